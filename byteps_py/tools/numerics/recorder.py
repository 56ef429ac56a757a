"""Records what a model computes on one rank: outputs of modules, gradients, parameters. See records.py for the files.

Hooks see tensors and never change them; recorded runs have the bits of others. A module's input gets a view of its
own, so that the gradient of each module's input is known where several modules share it. The gradient of an input that
its module overwrites is not recorded. The thread that runs the model, and autograd's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash
from torch import nn
from torch.utils.hooks import RemovableHandle

from byteps_py.errors import UsageError
from byteps_py.tools.numerics.records import (
    ACCUMULATION,
    BACKWARD,
    FORWARD,
    REDUCTION,
    SEPARATE,
    UPDATE,
    RankLayout,
    RecordRule,
    RecordWriter,
    TensorPlacement,
    TensorRecord,
    described,
)


class Recorder:
    """Writes the tensors of a run to a folder, for `bps numerics compare`.

    Each call of an attached model is the next micro-batch of the step. ``reduced_gradients`` is called when gradients
    have been reduced, ``step_done`` after the optimizer's step.

    Args:
        folder: one for all ranks of a run; each rank writes its own files there.
        layout: this rank's place in the mesh. Default: one process.
        rules: how tensors are cut and which operation computed them (``tensor_parallel_rules``, …). In dimensions that
            no rule names, activations and the gradients of micro-batches are separate along the layout's data
            dimensions, and all else is replicated.
        values: also keep the tensors' values. Without them, tensors that are cut can't be compared with whole ones,
            and a difference has no size.
        modules: a pattern of the names of modules to record (fnmatch).

    Raises UsageError if the folder can't be written.

    >>> import tempfile
    >>> from byteps_py.tools.numerics.records import read_run
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Recorder(folder) as recorder:
    ...         recorder.attach(model)
    ...         model(torch.ones(1, 2)).sum().backward()
    ...         recorder.step_done()
    ...     [f"{each.phase} {each.module} {each.tensor}" for each in read_run(Path(folder))[0].records[:3]]
    ['forward 0 output', 'forward 1 output', 'backward 1 grad_output']
    """

    def __init__(
        self,
        folder: str | Path,
        layout: RankLayout | None = None,
        rules: Sequence[RecordRule] = (),
        values: bool = True,
        modules: str = "*",
    ) -> None:
        self.layout = layout if layout is not None else RankLayout()
        self.step = 0
        self._rules, self._values, self._modules = tuple(rules), values, modules
        self._writer = RecordWriter(Path(folder), self.layout)
        self._handles: list[RemovableHandle] = []
        self._roots: list[_AttachedModel] = []
        self._coordinates = dict(self.layout.coordinates)
        self._seen: Counter[tuple[Any, ...]] = Counter()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def attach(self, model: nn.Module, prefix: str = "", micro_batches: Sequence[int] | None = None) -> None:
        """Record what this model computes from now on. An nn.Sequential of layers is recorded as its layers, since a
        pipeline may cut it.

        Args:
            model: the model, or one stage of a pipeline. Its modules' names begin with ``prefix``.
            prefix: the stage's name in the whole model, such as "layers.3.".
            micro_batches: the numbers of a step's micro-batches in the order in which the model gets them (a pipe of
                Chimera gets some of them only). Default: 0, 1, 2, …
        """
        attached = _AttachedModel(self, model, prefix, micro_batches)
        self._roots.append(attached)
        self._handles += attached.hook()

    @contextmanager
    def at(self, **coordinates: int) -> Iterator[None]:
        """Record for these coordinates, and count micro-batches from 0: one process in the place of several.

        A reference run takes the samples of each data-parallel rank d in turn, ``with recorder.at(dp=d)``.
        """
        before, self._coordinates = self._coordinates, {**self._coordinates, **coordinates}
        for root in self._roots:
            root.restart()
        try:
            yield
        finally:
            self._coordinates = before

    def reduced_gradients(self, gradients: Mapping[str, torch.Tensor] | None = None) -> None:
        """Record the gradients of all parameters after their reduction. ``gradients``: by name, if they are not in
        ``parameter.grad``, such as ``Float32Gradients.gradients()``."""
        if gradients is None:
            gradients = {name: parameter.grad for name, parameter in self._parameters() if parameter.grad is not None}
        for name, gradient in gradients.items():
            self._record_parameter(REDUCTION, None, name, gradient)

    def step_done(self) -> None:
        """Record the parameters after the optimizer's step. Later records belong to the next step."""
        for name, parameter in self._parameters():
            self._record_parameter(UPDATE, None, name, parameter)
        self._writer.flush()
        self.step += 1
        self._seen.clear()
        for root in self._roots:
            root.restart()

    def record(self, name: str, tensor: torch.Tensor, phase: str = FORWARD, micro_batch: int | None = None) -> None:
        """Record a tensor of your own under the name of a module, such as a loss."""
        self._record(phase, micro_batch, name, "value", tensor)

    def close(self) -> None:
        """Remove the hooks and close the files. May be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._writer.close()

    # ---- for the hooks -------------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for root in self._roots:
            for name, parameter in root.model.named_parameters():
                yield root.prefix + name, parameter

    def _record_parameter(self, phase: str, micro_batch: int | None, name: str, tensor: torch.Tensor) -> None:
        module, _, own = name.rpartition(".")
        self._record(phase, micro_batch, module, own, tensor)

    def _record(self, phase: str, micro_batch: int | None, module: str, tensor: str, value: torch.Tensor) -> None:
        if not fnmatchcase(module, self._modules):
            return
        rule = described(self._rules, phase, module, tensor)
        by_samples = phase in (FORWARD, BACKWARD, ACCUMULATION)
        placements: dict[str, TensorPlacement] = {
            name: TensorPlacement(SEPARATE) for name in self.layout.data if by_samples and name in self._coordinates
        }
        placements.update(rule.placements)
        local, own = _local(value)
        placements.update(own)
        key = (phase, micro_batch, module, tensor, *sorted(self._coordinates.items()))
        data, figures = _bytes_of(local), _figures(local)
        record = TensorRecord(
            step=self.step,
            micro_batch=micro_batch,
            phase=phase,
            module=module,
            tensor=tensor,
            occurrence=self._seen[key],
            coordinates=dict(self._coordinates),
            dtype=str(local.dtype).removeprefix("torch."),
            shape=tuple(local.shape),
            digest=xxhash.xxh3_128_hexdigest(data),
            minimum=figures[0],
            maximum=figures[1],
            norm=figures[2],
            placements={name: each for name, each in placements.items() if name in self._coordinates},
            operation=rule.operation,
            over=rule.over,
        )
        self._seen[key] += 1
        self._writer.write(record, data if self._values else None)


class _AttachedModel:
    """The hooks of one model, and the number of its calls in this step."""

    def __init__(self, recorder: Recorder, model: nn.Module, prefix: str, micro_batches: Sequence[int] | None) -> None:
        self.model, self.prefix = model, prefix
        self._recorder, self._numbers = recorder, micro_batches
        self._calls = 0
        self._backward_of = 0  # the micro-batch whose backward pass has begun last
        self._ready: list[tuple[str, torch.Tensor]] = []  # parameters with a new gradient in this backward pass

    def restart(self) -> None:
        """The next call is the first micro-batch."""
        self._calls = 0

    def hook(self) -> list[RemovableHandle]:
        """Hooks on all modules, and on all parameters that train."""
        handles = [self.model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)]
        chains = set(_sequential_modules(self.model))
        for name, module in self.model.named_modules():
            if module not in chains:
                full = (self.prefix + name).removesuffix(".")
                handles.append(module.register_forward_pre_hook(self._input_hook(full), with_kwargs=True))
                handles.append(module.register_forward_hook(self._output_hook(full)))
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                hook = self._accumulation_hook(self.prefix + name)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
        return handles

    def _micro_batch(self) -> int:
        if _is_backward():
            return self._backward_of
        call = max(0, self._calls - 1)
        if self._numbers is None:
            return call
        if call >= len(self._numbers):
            raise UsageError(
                f"call {call + 1} of a model in one step, but attach() got the numbers of {len(self._numbers)} "
                "micro-batches: give all, or call step_done() after each step"
            )
        return self._numbers[call]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not _is_backward():  # else activations are computed again (checkpointing)
            self._calls += 1
            if not self.prefix and type(module) is not nn.Sequential:
                for name, tensor in _named("input", (*args, *kwargs.values())):
                    self._recorder._record(FORWARD, self._micro_batch(), "", name, tensor)

    def _input_hook(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            number, single = self._micro_batch(), len(_tensors((*args, *kwargs.values()))) == 1
            counter = iter(range(len(args) + len(kwargs)))

            def viewed(value: Any) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                position = next(counter)
                if not value.requires_grad or not torch.is_grad_enabled():
                    return value
                view = value.view_as(value)
                tensor_name = "grad_input" if single else f"grad_input.{position}"
                view.register_hook(lambda gradient: self._gradient(name, number, tensor_name, gradient))
                return view

            return tuple(viewed(value) for value in args), {key: viewed(value) for key, value in kwargs.items()}

        return hook

    def _output_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            number, again = self._micro_batch(), _is_backward()
            for (tensor_name, tensor), (of_gradient, _) in zip(
                _named("output", output), _named("grad_output", output), strict=True
            ):
                if not again:
                    self._recorder._record(FORWARD, number, name, tensor_name, tensor)
                if tensor.requires_grad:

                    def of_output(gradient: torch.Tensor, own: str = of_gradient) -> None:
                        self._gradient(name, number, own, gradient)

                    tensor.register_hook(of_output)

        return hook

    def _gradient(self, name: str, micro_batch: int, tensor: str, gradient: torch.Tensor) -> None:
        self._backward_of = micro_batch
        self._recorder._record(BACKWARD, micro_batch, name, tensor, gradient)

    def _accumulation_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        """Records the gradient when the backward pass has ended, and with it the hooks that accumulate it elsewhere."""

        def hook(parameter: torch.Tensor) -> None:
            if not self._ready:
                torch.autograd.Variable._execution_engine.queue_callback(self._record_accumulated)
            self._ready.append((name, parameter))

        return hook

    def _record_accumulated(self) -> None:
        ready, self._ready = self._ready, []
        for name, parameter in ready:
            gradient = parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)
            if gradient is not None:
                self._recorder._record_parameter(ACCUMULATION, self._backward_of, name, gradient)


def _sequential_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The nn.Sequential in which the model's layers are, and those inside it."""
    if type(module) is nn.Sequential:
        yield module
        for child in module.children():
            yield from _sequential_modules(child)


def _is_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)  # as torch.utils.module_tracker


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for each in value for tensor in _tensors(each)]


def _named(name: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    found = _tensors(value)
    return [(name if len(found) == 1 else f"{name}.{number}", tensor) for number, tensor in enumerate(found)]


def _local(value: torch.Tensor) -> tuple[torch.Tensor, dict[str, TensorPlacement]]:
    """This rank's part of a DTensor, and how it is cut; of another tensor, itself."""
    if type(value) in (torch.Tensor, nn.Parameter):
        return value.detach(), {}
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if not isinstance(value, DTensor):
        return value.detach(), {}
    names, found = value.device_mesh.mesh_dim_names, {}
    for name, placement in zip(names or (), value.placements, strict=True):
        if type(placement) is Shard:
            found[name] = TensorPlacement("shard", placement.dim)
        elif isinstance(placement, Partial) and placement.reduce_op == "sum":
            found[name] = TensorPlacement("partial")
        elif isinstance(placement, Replicate):
            found[name] = TensorPlacement()
        else:
            raise UsageError(f"a DTensor with {placement} along {name}: only Shard, Replicate and Partial('sum')")
    return value.to_local().detach(), found


def _bytes_of(tensor: torch.Tensor) -> bytes:
    whole = tensor.contiguous().reshape(-1).cpu()
    return whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""


def _figures(tensor: torch.Tensor) -> tuple[float | None, float | None, float | None]:
    """Smallest and largest value and 2-norm; None where they are not finite."""
    if not tensor.numel():
        return None, None, None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    values = tensor.double()
    found = (values.min().item(), values.max().item(), values.norm().item())
    low, high, norm = (number if math.isfinite(number) else None for number in found)
    return low, high, norm
