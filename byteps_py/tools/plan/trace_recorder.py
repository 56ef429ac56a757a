"""Counts what a module does on the meta device: operators, their FLOPs and bytes, and the tensors that autograd keeps.

Each operator belongs to the innermost module that runs. A layer is a module that no pipeline cuts: a repeated block, or
what stands beside these blocks. scaled_dot_product_attention is counted as the fused kernel that GPUs have: the meta
device would write out all scores. One thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from byteps_py.tools.plan.model_costs import (
    AttentionSize,
    LayerCost,
    ModelCosts,
    OperatorCost,
    RepeatedBlocks,
    UncostedOperator,
    find_blocks,
)

#: Operators that read and write memory and compute little, beside elementwise ones, which torch marks.
_MEMORY_BOUND = """
    _adaptive_avg_pool2d all amax amin any arange argmax argmin avg_pool2d bernoulli cat clone constant_pad_nd
    copy copy_ cumsum embedding _embedding_bag empty empty_like empty_strided eye fill_ flip full full_like
    _fused_rms_norm _fused_rms_norm_backward gather index index_put index_select lift_fresh lift_fresh_copy
    linalg_vector_norm linspace _log_softmax logsumexp masked_fill max max_pool2d_with_indices mean min
    native_batch_norm _native_batch_norm_legit native_dropout native_group_norm native_layer_norm new_empty
    new_full new_ones new_zeros nll_loss2d_forward nll_loss_forward normal_ ones ones_like _prelu_kernel repeat
    roll _safe_softmax scalar_tensor scatter scatter_add select_scatter slice_scatter _softmax
    split_with_sizes_copy stack std sum _to_copy tril triu uniform_ _unsafe_index _unsafe_view
    upsample_bilinear2d upsample_nearest2d var var_mean _weight_norm_interface zero_ zeros zeros_like
"""
_MEMORY_BOUND_NAMES = frozenset(_MEMORY_BOUND.split())
_COPIES = frozenset(("_to_copy", "clone", "copy_", "cat", "stack", "native_dropout", "lift_fresh_copy"))
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _key(tensor: torch.Tensor) -> int:
    """Of its memory: views have the same."""
    return int(tensor.untyped_storage()._cdata)


@dataclass
class _Layer:
    """The counts of a layer while the model runs."""

    name: str
    kind: str
    flops: int = 0
    moved_bytes: int = 0
    activation_bytes: int = 0
    output_shape: tuple[int, ...] = ()


@dataclass
class _Records:
    """The counts of the whole model. Tensors are kept, so that no two of them have the same identity."""

    operators: list[OperatorCost] = field(default_factory=list)
    #: The layer that read a parameter first.
    readers: dict[int, str] = field(default_factory=dict)
    #: The operator that wrote the memory of a tensor last.
    writers: dict[int, int] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)
    uncosted: Counter[str] = field(default_factory=Counter)
    uncosted_bytes: Counter[str] = field(default_factory=Counter)
    attention: Counter[AttentionSize] = field(default_factory=Counter)


class TraceRecorder:
    """Counts what runs within its block. ``place``: the path of the innermost module that runs."""

    def __init__(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._names = list(layer_names(model))
        self._layers: dict[str, _Layer] = {}
        self._stack: list[str] = []
        self._exit = ExitStack()
        self._parameters = {_key(one): one for one in model.parameters()}
        self._unsaved = {_key(one) for one in (*model.parameters(), *model.buffers(), *inputs)}
        self.records = _Records()

    @property
    def place(self) -> str:
        """The path of the innermost module that runs, or that has failed."""
        return self._stack[-1] if self._stack else ""

    def __enter__(self) -> TraceRecorder:
        for name, module in self._modules.items():
            if name:
                self._exit.callback(module.register_forward_pre_hook(self._entering(name)).remove)
                self._exit.callback(module.register_forward_hook(self._leaving(name)).remove)
        self._exit.enter_context(saved_tensors_hooks(self._on_saved, _same))
        self._exit.enter_context(_fused_attention(self.records.attention))
        self._exit.enter_context(_Operators(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._stack.append(name)
            if name in self._names:
                self._layer()

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(_module: nn.Module, _inputs: object, output: object) -> None:
            self._stack.pop()
            if name in self._layers and (tensors := [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]):
                self._layers[name].output_shape = tuple(tensors[0].shape)

        return leave

    def _layer(self) -> _Layer:
        """The layer that runs. They are kept in the order of their first operators."""
        place = self.place
        name = next((one for one in self._names if place == one or place.startswith(f"{one}.")), "")
        return self._layers.setdefault(name, _Layer(name, type(self._modules[name]).__name__))

    def _on_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _key(tensor)
        if key not in self._unsaved and key not in self.records.saved:
            self.records.saved.add(key)
            self.records.kept.append(tensor)
            self._layer().activation_bytes += tensor.untyped_storage().nbytes()
        return tensor

    def on_operator(self, operator: Any, arguments: Any, output: Any, flops: int | None) -> None:
        """Count a call. ``flops``: None without a formula."""
        records, layer = self.records, self._layer()
        read = [one for one in tree_leaves(arguments) if isinstance(one, torch.Tensor)]
        written = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor)]
        sources = {_key(one) for one in read}
        records.kept += written
        if not written or (not operator._schema.is_mutable and all(_key(one) in sources for one in written)):
            return  # a view
        kind = str(operator.overloadpacket)
        moved = sum(one.numel() * one.element_size() for one in (*read, *written))
        layer.flops += flops or 0
        layer.moved_bytes += moved
        if flops is None and not _is_memory_bound(operator):
            records.uncosted[kind] += 1
            records.uncosted_bytes[kind] += moved
        parameters = {key: self._parameters[key].numel() for key in sources if key in self._parameters}
        for key in parameters:
            records.readers.setdefault(key, layer.name)
        inputs = dict.fromkeys(records.writers[key] for key in map(_key, read) if key in records.writers)
        size = written[0]
        records.operators.append(
            OperatorCost(
                kind,
                self.place,
                flops or 0,
                moved,
                tuple(size.shape),
                size.numel() * size.element_size(),
                sum(parameters.values()),
                tuple(inputs),
                torch.Tag.pointwise in operator.tags or operator.overloadpacket.__name__ in _COPIES,
            )
        )
        for one in written:
            records.writers[_key(one)] = len(records.operators) - 1

    def costs(self, output: object) -> ModelCosts:
        """All that was counted. ``output``: of the model."""
        seen: set[int] = set()
        layers, signatures, shared = [], list[object](), 0
        others = self._other_parameters()
        for name, layer in self._layers.items():
            module = self._modules[name]
            own = dict(module.named_parameters()) if name else {}
            own |= {path: one for path, one in others.items() if self.records.readers.get(_key(one)) == name}
            fresh = {id(one): one for one in own.values() if id(one) not in seen}
            shared += sum(one.numel() for one in own.values() if id(one) in seen)
            seen |= set(fresh)
            count = sum(one.numel() for one in fresh.values())
            matrices = tuple((one.shape[0], one.shape[1]) for one in own.values() if one.dim() == 2)
            shapes = tuple((path, tuple(one.shape)) for path, one in own.items())
            signatures.append((layer.kind, layer.output_shape, shapes) if name and shapes else None)
            layers.append(
                LayerCost(
                    name,
                    layer.kind,
                    count,
                    layer.flops,
                    layer.moved_bytes,
                    layer.activation_bytes,
                    layer.output_shape,
                    matrices,
                )
            )
        records = self.records
        floats = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.dim() > 1]
        unused = sum(one.numel() for one in self._model.parameters() if id(one) not in seen)
        if unused:
            layers.append(LayerCost("", "parameters that the forward pass does not use", unused, 0, 0, 0, (), ()))
            signatures.append(None)
        return ModelCosts(
            tuple(layers),
            tuple(records.operators),
            tuple(
                UncostedOperator(kind, calls, records.uncosted_bytes[kind])
                for kind, calls in records.uncosted.most_common()
            ),
            tuple(self._whole_runs(find_blocks(signatures), layers)),
            records.attention.most_common(1)[0][0] if records.attention else None,
            max((one.shape[-1] for one in floats), default=0),
            shared,
        )

    def _whole_runs(self, runs: Iterator[RepeatedBlocks], layers: Sequence[LayerCost]) -> Iterator[RepeatedBlocks]:
        """Blocks are made of several modules: two activations in a row are none."""
        for run in runs:
            if any(self._modules[layers[run.first].name].children()):
                yield run

    def _other_parameters(self) -> Mapping[str, nn.Parameter]:
        """Those of no layer that has run: they belong to the layer that has read them."""
        ran = [f"{name}." for name in self._layers if name]
        named = self._model.named_parameters()
        return {path: one for path, one in named if not any(path.startswith(name) for name in ran)}


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def layer_names(model: nn.Module) -> Iterator[str]:
    """The paths of the modules that are layers: in a container whose members are equal blocks, each member; of other
    modules, the members if there are such blocks within them, or if they are nn.Sequential; else the module itself."""
    for name, child in model.named_children():
        if _has_blocks(child) or isinstance(child, nn.Sequential | nn.ModuleList):
            yield from (f"{name}.{inner}" for inner in layer_names(child))
        else:
            yield name


def _has_blocks(module: nn.Module) -> bool:
    """Whether a container with equal blocks is within ``module``, itself included."""
    return any(
        len(one) > 1 and next(find_blocks([_signature(child) for child in one]), None) is not None
        for one in module.modules()
        if isinstance(one, nn.Sequential | nn.ModuleList)
    )


def _signature(module: nn.Module) -> object:
    shapes = tuple((name, tuple(one.shape)) for name, one in module.named_parameters())
    return (type(module), shapes) if shapes and any(module.children()) else None


def _is_memory_bound(operator: Any) -> bool:
    if operator.namespace not in ("aten", "prims"):
        return False
    name = operator.overloadpacket.__name__
    return (
        torch.Tag.pointwise in operator.tags or name in _MEMORY_BOUND_NAMES or name.rstrip("_") in _MEMORY_BOUND_NAMES
    )


class _Operators(TorchDispatchMode):
    """Tells the trace of each operator."""

    def __init__(self, recorder: TraceRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        flops = None
        if func.overloadpacket is _ATTENTION:
            flops = _attention_flops(*args[:3])
        elif (formula := flop_registry.get(func.overloadpacket)) is not None:
            flops = int(formula(*args, **kwargs, out_val=output))
        self._recorder.on_operator(func, (args, kwargs), output, flops)
        return output


def _attention_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Heads of keys serve a group of heads of queries."""
    heads = q.shape[1]
    keys, values = ((one.shape[0], heads, *one.shape[2:]) for one in (k, v))
    return int(sdpa_flop_count(tuple(q.shape), keys, values))


@contextmanager
def _fused_attention(counts: Counter[AttentionSize]) -> Iterator[None]:
    """Within the block, scaled_dot_product_attention is one operator on the meta device, however it is called.
    ``counts``: of its sizes."""

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        if q.dim() == 4:
            counts[AttentionSize(q.shape[1], k.shape[1], q.shape[3])] += 1
        if q.dim() != 4 or q.shape[-1] != v.shape[-1] or (attn_mask is not None and attn_mask.requires_grad):
            written_out = torch.ops.aten._scaled_dot_product_attention_math
            return written_out(q, k, v, attn_mask, dropout_p, is_causal, **others)[0]  # type: ignore[no-any-return]
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros(attn_mask.shape, dtype=q.dtype, device="meta")
        fused = _ATTENTION(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=others.get("scale"))
        return fused[0]  # type: ignore[no-any-return]

    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attend, "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()
