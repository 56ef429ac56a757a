"""Gradients that travel compressed between machines: of FSDP2's modules, and of the copies of a part of a model.

``compress_gradients`` gives each FSDP2 module a reduce-scatter with a codec, which the communication service makes
without servers (worker/core/scatter.py):

    gradients of a module ─► sum of each machine, each rank's piece encoded ─► the machine of the piece's rank: decode,
                                                                               sum in float32 in the order of machines

What a codec means, and what a machine keeps for it, are those of all other sums (docs/explanation/compression.md). THC,
whose machines need the sum to agree on the next steps, sums the whole gradient through servers, and each rank keeps its
piece. FSDP2 waits for a reduce-scatter before the next one begins. Its threads call the object, one at a time.

``CompressedAverages`` are those over ``mesh.gradient_group``. The codecs' state that a machine keeps belongs to this
group: ranks of one machine with other parts have their own. One thread uses it; hooks run on autograd's.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from byteps_py import rank_bits
from byteps_py.errors import UnsupportedError, UsageError
from byteps_py.parallel.collectives import REDUCE_SCATTER
from byteps_py.parallel.pipe.pipeline import Pipeline
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import PRIORITY_READY_ORDER, NonFinite, TensorSpec
from byteps_py.torch.collectives import context as contexts, nonfinite
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import wire_dtype
from byteps_py.torch.collectives.members import digest_of
from byteps_py.torch.collectives.parameter_owners import announce_averaging, check_unowned
from byteps_py.torch.collectives.slot_view import TensorRequest
from byteps_py.torch.compression import (
    CompressionArgument,
    Compressor,
    check_low_rank,
    choice_of,
    codec_for,
    compression_of,
)
from byteps_py.torch.gradients.bucket import GradientOptions
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.hosted.optimizer import check_hosted_compression
from byteps_py.torch.gradients.hosted.states_mode import asked_for
from byteps_py.torch.operations.handles import kind_in_group, synchronize
from byteps_py.torch.operations.reductions import ReductionOptions, Sum, start_reduction
from byteps_py.torch.process_group.group_base import reduction_of

#: The name of each module's gradients, which is claimed once.
_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


class CodedReduceScatter:
    """A reduce-scatter for ``FSDPModule.set_custom_reduce_scatter``. ``title``: of the module, for messages; ``name``:
    of its gradients, for the service. ``module``: it has this reduce-scatter, so it is not kept here."""

    def __init__(self, title: str, name: str, module: FSDPModule, compression: type[Compressor]) -> None:
        self._title = title
        self._name = name
        self._module = weakref.ref(cast(nn.Module, module))
        self._compression = compression

    @staticmethod
    def allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The input, and the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's piece of the reduction to ``output_tensor``. Done when it returns.

        Raises UsageError for gradients that the codec can't be for, NonFiniteError if BYTEPS_NONFINITE is raise, and
        the errors of sums.
        """
        context = contexts.current()
        dtype = self._compression.wire_dtype(input_tensor.dtype)
        codec = codec_for(self._compression, dtype, input_tensor.nbytes, self._name, context.settings)
        ranks = dist.get_process_group_ranks(group)
        if dtype is not input_tensor.dtype:
            short = torch.empty_like(output_tensor, dtype=dtype)
            getattr(dist, REDUCE_SCATTER)(short, input_tensor.to(dtype), op=op, group=group)
            output_tensor.copy_(short)
        elif codec is None or _are_on_one_machine(context, ranks):
            getattr(dist, REDUCE_SCATTER)(output_tensor, input_tensor, op=op, group=group)
        else:
            self._sum(context, codec, output_tensor, input_tensor, ranks, op)

    def _sum(
        self,
        context: Context,
        codec: Codec,
        output: torch.Tensor,
        source: torch.Tensor,
        ranks: Sequence[int],
        op: Any,
    ) -> None:
        session, how = context.session, reduction_of(op, source.dtype)
        if ranks != sorted(ranks) or session.rank not in ranks or max(ranks) >= session.size:
            raise UsageError(
                f"compress_gradients: module {self._title!r} is sharded over the ranks {ranks} of torch.distributed, "
                f"which are not those of byteps_py, 0 to {session.size - 1}, in order; start both from one launcher"
            )
        group = () if len(ranks) == session.size else tuple(ranks)
        mode = nonfinite.mode_of(context)
        if mode is NonFinite.SKIP:
            raise UnsupportedError(
                "compress_gradients can't leave out a step, which is your optimizer's: use BYTEPS_NONFINITE=raise or "
                "allow"
            )
        name = f"{kind_in_group(group, 'FSDP')}.{self._name}{self._layout(codec, source.numel(), len(ranks))}"
        scatters = not codec.is_thc
        spec = TensorSpec(
            name, wire_dtype(source.dtype, name), (source.numel(),), average=how.average,
            priority=PRIORITY_READY_ORDER, group=group, scatters=scatters,
            nonfinite=NonFinite.ALLOW if scatters else mode, codec=codec,
        )  # fmt: skip
        pieces = (tuple(output.shape),) * (1 if scatters else len(ranks))
        (view,) = context.slot_views([TensorRequest(spec, source.dtype, (spec.shape,), source.device, pieces)])
        view.contribute([how.prepare(source)])
        view.wait()
        blame = view.slot.nonfinite_ranks
        if scatters and mode is NonFinite.RAISE:
            blame = _nonfinite_ranks(context, name, source, view.results[0], group)
        if blame:
            place = nonfinite.where(name, torch.cat(view.results), source.dtype)
            raise nonfinite.explain(blame, session.size, view.slot.round, [place or repr(name)])
        view.fetch([output], [0 if scatters else ranks.index(session.rank)])
        if (queued := view.mover.queued()) is not None:
            queued.synchronize()  # before the memory of the result is that of another round

    def _layout(self, codec: Codec, count: int, members: int) -> str:
        """A name for this gradient among others of the module: FSDP2 reduces only those parameters that have
        gradients. Raises UsageError if a codec keeps something of them, and it is not known of which it would be."""
        if not codec.has_states:
            return f" ({count})"
        module = self._module()
        params = [] if module is None else [each for group in _param_groups(module) for each in group.fsdp_params]
        trained = [i for i, each in enumerate(params) if each.sharded_param.requires_grad]
        due = sum(params[i].padded_sharded_param_size.numel() for i in trained) * members
        if count != due:
            raise UsageError(
                f"compress_gradients: only some parameters of module {self._title!r} have gradients in this step "
                f"({count} elements of {due}), and {codec} keeps what was not sent of each. Use one without error "
                "feedback and momentum, or let all parameters take part (set_reduce_scatter_unused_params)"
            )
        return "" if len(trained) == len(params) else f" (parameters {'-'.join(map(str, trained))})"


def _nonfinite_ranks(
    context: Context, name: str, gradient: torch.Tensor, piece: torch.Tensor, group: tuple[int, ...]
) -> int:
    """The ranks whose gradient is not finite, as in rank_bits.py: each sees its own piece of the sum only, and all are
    to raise. All ranks of the group call it."""
    session = context.session
    flags = torch.zeros(session.size + 1, dtype=torch.int32, device="cpu")
    flags[session.rank] = not nonfinite.is_finite(gradient)
    flags[session.size] = not nonfinite.is_finite(piece)
    synchronize(start_reduction([flags], [flags], f"{name}.nonfinite", ReductionOptions(Sum, "FSDP", group)))
    *ranks, sums = flags.tolist()
    bits = [rank_bits.of_rank(rank, session.size) for rank, flag in enumerate(ranks) if flag]
    return functools.reduce(operator.or_, bits, 0) or (rank_bits.OVERFLOW if sums else 0)


def _are_on_one_machine(context: Context, ranks: Sequence[int]) -> bool:
    """Nothing travels between machines."""
    session = context.session
    first = session.rank - session.local_rank
    return all(first <= rank < first + session.local_size for rank in ranks)


def compress_gradients(model: nn.Module, compression: Any) -> None:
    """Let the gradients of an FSDP2 model travel compressed between machines.

    Each machine codes the pieces of a module's gradient one by one, and sends each to the machine of its rank, which
    adds what the codes decode to: (n-1)/n of the coded bytes for each of n machines. Error feedback and momentum belong
    to the module, and ``compression_state_dict`` has them. Gradients below BYTEPS_MIN_COMPRESS_BYTES, and those of
    ranks of one machine, are reduced as without it.

    Args:
        model: after ``fully_shard``, over any backend, and after ``init()``. Its submodules may be sharded, too. All
            ranks call this function, before the first step or between two, again with another compression or with
            ``Compression.none``.
        compression: one of Compression, or a dictionary of BytePS.

    Raises:
        UsageError: the model has no FSDP2 module; ``compression`` is none for single tensors (rules, a warm-up,
            powersgd), or not for the dtype of its gradients; the mesh has copies of shards (HSDP), whose sums over
            copies would travel as they are.
        UnsupportedError: torch is older than 2.9.
        NotInitializedError: before ``init()``.

    With error feedback or momentum a step raises UsageError if only some parameters of a module have gradients in it.

    >>> compress_gradients(torch.nn.Linear(2, 2), "int8")
    Traceback (most recent call last):
    byteps_py.errors.UsageError: compress_gradients: the model has no FSDP2 module; call fully_shard() first
    """
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise UnsupportedError(
            f"compress_gradients: torch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter; it needs "
            "torch 2.9"
        )
    modules = [(name or "(the model)", each) for name, each in model.named_modules() if isinstance(each, FSDPModule)]
    if not modules:
        raise UsageError("compress_gradients: the model has no FSDP2 module; call fully_shard() first")
    chosen, context = compression_of(compression), contexts.current()
    for title, module in modules:
        for dtype in _gradient_dtypes(module):
            codec_for(chosen, dtype, 0, title, context.settings)
        if _has_copies(module):
            raise UsageError(
                f"compress_gradients: module {title!r} is sharded over a mesh with copies of its shards (HSDP), whose "
                "sums over the copies FSDP2 makes itself, uncompressed. Use a mesh of one dimension, or compress "
                "the sums over copies, by ProcessGroupOptions of their group"
            )
    for title, module in modules:
        inner = cast(nn.Module, module)
        if inner not in _names:
            _names[inner] = context.claim(_name_of(title, inner))
        comm = CodedReduceScatter(title, _names[inner], module, chosen)
        try:
            module.set_custom_reduce_scatter(cast(Any, comm))
        except ValueError as error:
            raise UnsupportedError(f"compress_gradients: module {title!r}: {error}") from error


def _param_groups(module: nn.Module) -> Sequence[Any]:
    """What FSDP2 knows of the parameters that it gathers for this module: of one without parameters, nothing."""
    state = cast(Any, module)._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # before torch 2.13


def _name_of(title: str, module: nn.Module) -> str:
    """Numbered per group of ranks, because others do not count along: stages of a pipeline have other modules."""
    everyone = [*range(dist.get_world_size())]
    for group in _param_groups(module):
        ranks = dist.get_process_group_ranks(group.mesh_info.shard_process_group)
        return title if ranks == everyone else f"{title} of {digest_of(ranks)}"
    return title


def _gradient_dtypes(module: FSDPModule) -> set[torch.dtype]:
    """In which its gradients are reduced."""
    policy = getattr(cast(Any, module)._get_fsdp_state(), "_mp_policy", None)
    short = getattr(policy, "reduce_dtype", None) or getattr(policy, "param_dtype", None)
    own = {each.sharded_param.dtype for group in _param_groups(cast(nn.Module, module)) for each in group.fsdp_params}
    return {short} if short is not None else own


def _has_copies(module: FSDPModule) -> bool:
    return any(hasattr(group.mesh_info, "replicate_process_group") for group in _param_groups(cast(nn.Module, module)))


_CALLER = "parallelize_model with compression"


def check_compression(
    model: nn.Module, compression: CompressionArgument, hosted: bool | str = False, shadow: bool = False
) -> None:
    """Raises UsageError for a compression that is none, or that a parameter or a hosted optimizer can't have, and if
    something else averages gradients already; NotInitializedError before init()."""
    named, choice, settings = list(model.named_parameters()), choice_of(compression), contexts.current().settings
    for name, parameter in named:
        chosen = choice.of(name, parameter)
        check_low_rank(chosen, name, parameter)
        codec_for(chosen, parameter.dtype, 0, name, settings)
    if hosted is not False or shadow:
        check_hosted_compression(choice, named, asked_for(hosted or True), shadow)
    check_unowned(named, _CALLER)


class CompressedAverages:
    """Of the gradients of ``module`` over the ranks of ``copies``, which all make it. ``passes``: backward passes of a
    step. Without a pipeline gradients are sent as the last one computes them."""

    def __init__(
        self, module: nn.Module | Pipeline, copies: dist.ProcessGroup, compression: CompressionArgument, passes: int
    ) -> None:
        context, named = contexts.current(), list(module.named_parameters())
        ranks = sorted(dist.get_process_group_ranks(copies))
        group = () if len(ranks) == context.session.size else tuple(ranks)
        prefix = f"{kind_in_group(group, 'Gradient')}."
        options = GradientOptions(choice_of(compression), group=group, prefix=prefix, caller=_CALLER)
        self._reducer = GradientReducer(context, named, options)
        if isinstance(module, Pipeline):  # knows itself when it is done with a gradient
            return
        announce_averaging(self, _CALLER, [parameter for _, parameter in named])
        self._reducer.passes_per_step = passes
        for _, parameter in named:
            if parameter.requires_grad:
                ready = functools.partial(self._reducer.ready, self._reducer.place(parameter))
                parameter.register_post_accumulate_grad_hook(ready)

    def finish(self) -> None:
        """After the last backward pass: put the averages into ``p.grad``. All copies call it."""
        self._reducer.finish()
        self._reducer.skip_step()
