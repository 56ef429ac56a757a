"""The functions of the package: who am I, push_pull in its forms, poll, synchronize, barrier, join.

Names and argument names are BytePS's (byteps.torch) and Horovod's; what is Horovod's alone is in allreduce.py,
broadcasts.py, gathers.py and scatter.py. Any thread may call, and may wait for a handle of another thread. Tensors:
dense, on cpu or cuda, of dtype float16, bfloat16, float32, float64, int8, int16, int32, int64, uint8.

All raise NotInitializedError outside init() … shutdown(), UsageError (a ValueError) for misuse, and when an
operation is waited for MismatchError, StallError or PeerLostError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.session.subset import among, rank_in
from byteps_py.settings import Settings
from byteps_py.torch import timeline
from byteps_py.torch.compression import Compression, Compressor
from byteps_py.torch.engine import context as contexts
from byteps_py.torch.horovod.ops import Average, ReduceOp, Sum, which_op
from byteps_py.torch.horovod.plans import ReductionOptions
from byteps_py.torch.horovod.process_sets import ProcessSet, global_process_set, group_of, is_communicator, meet, set_up
from byteps_py.torch.horovod.reductions import start_reduction

# ---- life --------------------------------------------------------------------------------------------------


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    lazy: bool = True,
    *,
    settings: Settings | None = None,
) -> None:
    """Join the job that the environment (or ``settings``) describes; blocks until all ranks are there.

    A no-op if joined already. comm: the ranks, of one machine, that form a job of their own, numbered anew; or an
    mpi4py communicator of such ranks; default: all. process_sets: sets to add at once, the same on all ranks;
    "dynamic" is Horovod's and changes nothing, sets can always be added later. ``lazy`` is BytePS's (there the first
    argument) and changes nothing either. Raises ConfigurationError, RendezvousError; UsageError for a duplicate set.
    """
    context = contexts.current()
    if context.is_open:
        context.open()  # whoever else has joined may leave: torch.distributed's groups, say
        return
    settings = settings or Settings.from_env()
    if is_communicator(comm):
        settings = among(settings, comm.allgather(rank_in(settings)))
    elif comm is not None and not isinstance(comm, bool):
        settings = among(settings, comm)
    context.open(settings)
    try:
        timeline.set_up(context)
        if process_sets and not isinstance(process_sets, str):
            set_up(context, list(process_sets))
    except BaseException:
        context.close()
        raise


def shutdown() -> None:
    """Leave the job. Runs by itself at exit. Gradients already delivered stay readable."""
    contexts.current().close()


def suspend() -> None:
    """Leave the job in order to ``resume`` it later with other machines. Until then rank(), size() and their kin answer
    as before; whatever needs the other ranks raises NotInitializedError."""
    contexts.current().suspend()


def resume(num_workers: int, num_servers: int, global_rank: int = -1) -> None:
    """Join again after ``suspend``, in a job of ``num_workers`` GPU machines and ``num_servers`` CPU machines.

    ``global_rank``: this process's new rank; default: its machine keeps its index.
    """
    context = contexts.current()
    context.reopen(num_workers, num_servers, global_rank)
    timeline.set_up(context)


def is_initialized() -> bool:
    """True between init() and shutdown()."""
    return contexts.current().is_open


def rank() -> int:
    """This process's number, from 0 to size() - 1."""
    return contexts.current().place.rank


def size() -> int:
    """Number of training processes."""
    return contexts.current().place.size


def local_rank() -> int:
    """This process's number on its machine."""
    return contexts.current().place.local_rank


def local_size() -> int:
    """Number of training processes on this machine."""
    return contexts.current().place.local_size


def cross_rank() -> int:
    """The number of this machine."""
    return contexts.current().place.machine_index


def cross_size() -> int:
    """Number of machines with training processes."""
    return contexts.current().place.num_machines


def is_homogeneous() -> bool:
    """True if every machine has as many training processes as this one."""
    return contexts.current().place.is_homogeneous


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank (of the set) has called it."""
    context = contexts.current()
    group = group_of(process_set)
    if group:
        meet(context, group)
    else:
        context.session.barrier()


def join(device: int = -1) -> int:
    """Tell the others that this rank has no more data, and wait until every rank has done so.

    Until then the others' reductions go on without it; averages still divide by the number of all ranks. What needs
    every rank (broadcast, allgather, alltoall, reducescatter) raises JoinedError at the others where it is waited for.
    Returns the rank that joined last. ``device`` is Horovod's and changes nothing.
    """
    return contexts.current().join()


def declare(name: str) -> None:
    """Kept for BytePS's scripts. Tensors need no declaration: a name alone, not its order, makes the key."""
    contexts.current().session  # noqa: B018  raises NotInitializedError
    if not name:
        raise UsageError("a tensor's name must not be empty")


# ---- push_pull ---------------------------------------------------------------------------------------------


def push_pull_async(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    *,
    op: ReduceOp | None = None,
    compression: type[Compressor] = Compression.none,
) -> int:
    """Begin to reduce ``tensor`` over all ranks; ``synchronize(handle)`` gives the result, a new tensor.

    average: divide the sum by size() (integers: floor division). op: Sum, Average, Min, Max, Product instead.
    name: the same on all ranks; without one, unnamed tensors of equal shape and dtype are matched in order.
    priority: higher goes first when tensors compete; below zero, the first quarter of a tensor goes in the order of the
    calls, which machines share. version: BytePS's, without effect.
    A CUDA tensor must not be changed before ``synchronize``; a CPU tensor may be.
    """
    options = ReductionOptions(which_op(average, op), compression=compression, priority=priority)
    return start_reduction(contexts.current(), [tensor], None, name, options)


def push_pull_async_inplace(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    *,
    op: ReduceOp | None = None,
    compression: type[Compressor] = Compression.none,
) -> int:
    """Like push_pull_async, but the result goes into ``tensor`` when it is synchronized."""
    options = ReductionOptions(which_op(average, op), compression=compression, priority=priority)
    return start_reduction(contexts.current(), [tensor], [tensor], name, options)


byteps_push_pull = push_pull_async_inplace


def push_pull_inplace(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    *,
    op: ReduceOp | None = None,
    compression: type[Compressor] = Compression.none,
) -> torch.Tensor:
    """Reduce ``tensor`` over all ranks in place, and return it."""
    options = ReductionOptions(which_op(average, op), compression=compression, priority=priority)
    handle = start_reduction(contexts.current(), [tensor], [tensor], name, options, is_awaited=True)
    result: torch.Tensor = result_of(handle)
    return result


def push_pull(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: type[Compressor] = Compression.none,
    *,
    op: ReduceOp | None = None,
) -> torch.Tensor:
    """The reduction of ``tensor`` over all ranks; see push_pull_async. Differentiable for Sum and Average.

    >>> import torch, byteps_py as bps
    >>> bps.init()
    >>> bps.push_pull(torch.tensor([1.0, 2.0]), name="x")  # a job of one rank
    tensor([1., 2.])
    >>> bps.shutdown()
    """
    result: torch.Tensor = _PushPull.apply(tensor, which_op(average, op), name, priority, compression)  # type: ignore[no-untyped-call]
    return result


class _PushPull(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, op: ReduceOp, name: str | None, priority: int, compression: type[Compressor]
    ) -> torch.Tensor:
        ctx.arguments = contexts.current(), op, name, priority, compression
        options = ReductionOptions(op, compression=compression, priority=priority)
        result: torch.Tensor = result_of(
            start_reduction(ctx.arguments[0], [tensor], None, name, options, is_awaited=True)
        )
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        context, op, name, priority, compression = ctx.arguments
        if op not in (Sum, Average):
            raise UsageError(f"push_pull with op={op.name.title()} is not differentiable, only Sum and Average are")
        with contexts.use(context):  # autograd may run this on a thread of its own
            gradient = push_pull(
                grads[0],
                name=None if name is None else f"{name}.grad",
                priority=priority,
                compression=compression,
                op=op,
            )
        return gradient, None, None, None, None


# ---- handles -----------------------------------------------------------------------------------------------


def poll(handle: int) -> bool:
    """True if synchronize(handle) would not block. Raises UsageError for a handle that does not exist."""
    context = contexts.current()
    context.session  # noqa: B018  raises NotInitializedError
    operation = context.handles.get(handle)
    if operation.is_done:
        operation.settle()  # so that a tensor reduced in place holds its result from now on
    return operation.is_over


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result: a tensor, of a group a tuple of tensors, of alltoall_async the
    tensor and the received splits. None for a handle that does not exist (any more).
    """
    context = contexts.current()
    context.session  # noqa: B018  raises NotInitializedError
    operation = context.handles.pop(handle)
    return None if operation is None else operation.deliver()


def result_of(handle: int) -> Any:
    """For synchronous forms: ``synchronize`` of a handle of their own."""
    output = synchronize(handle)
    if output is None:
        raise UsageError(f"handle {handle} was cleared by a shutdown in another thread")
    return output
