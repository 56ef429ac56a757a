"""The functions that BytePS and Horovod share: init, rank, size, push_pull in its forms, poll, synchronize, join.

Names and arguments are those of byteps.torch and horovod.torch. Functions that only Horovod has are in files of their
own (see the package). Any thread may call, and may wait for another thread's handle. Tensors are dense, on cpu or cuda,
of dtype float16, bfloat16, float32, float64, int8, int16, int32, int64 or uint8.

All functions raise NotInitializedError outside init() … shutdown() and UsageError (a ValueError) for misuse. Waiting
for an operation raises MismatchError, StallError or PeerLostError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.session.subset import among, rank_in
from byteps_py.settings import Settings
from byteps_py.torch import timeline
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives import torch_rendezvous
from byteps_py.torch.compression import Compression, Compressor
from byteps_py.torch.horovod.ops import Average, ReduceOp, Sum, which_op
from byteps_py.torch.horovod.process_sets import (
    ProcessSet,
    add_initial_sets,
    barrier_in_group,
    global_process_set,
    group_of,
    is_communicator,
)
from byteps_py.torch.horovod.reduction_plans import ReductionOptions
from byteps_py.torch.horovod.reductions import start_reduction

# ---- the job -----------------------------------------------------------------------------------------------


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    lazy: bool = True,
    *,
    settings: Settings | None = None,
) -> None:
    """Join the job that the environment (or ``settings``) describes. Blocks until all ranks have joined.

    Has no effect if this process has joined already. The environment is bpslaunch's, torchrun's, mpirun's or srun's.
    Where only RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, or only a process group of torch.distributed
    exists, the ranks find out through torch's store which of them share a machine. Without any, it is a job of one.
    comm: ranks of one machine that form a job of their own, renumbered from 0, or an mpi4py communicator of such ranks;
    by default all ranks. process_sets: sets to add at once, the same on all ranks. Horovod's value "dynamic" has no
    effect: sets can always be added later. ``lazy`` is BytePS's argument and has no effect either.
    Any thread may call it. Raises ConfigurationError, RendezvousError, and UsageError for a duplicate set.

    >>> import byteps_py as bps
    >>> bps.init()  # without a launcher: a job of one rank
    >>> bps.rank(), bps.size()
    (0, 1)
    >>> bps.shutdown()
    """
    context = contexts.current()
    if context.is_open:
        context.open()  # stay in the job when another holder, such as torch.distributed, leaves
        return
    settings = settings or torch_rendezvous.complete(Settings.from_env())
    if is_communicator(comm):
        settings = among(settings, comm.allgather(rank_in(settings)))
    elif comm is not None and not isinstance(comm, bool):
        settings = among(settings, comm)
    context.open(settings)
    try:
        timeline.set_up(context)
        if process_sets and not isinstance(process_sets, str):
            add_initial_sets(context, list(process_sets))
    except BaseException:
        context.close()
        raise


def shutdown() -> None:
    """Leave the job. Called automatically at exit. Delivered results stay readable. No effect outside a job.

    Call it when training is done: with ``shadow=True``, servers drop the states that they keep for a restarted job if
    all ranks have called it. While an exception is raised or handled, as in ``try: train() finally: shutdown()``, it is
    the end of a rank that failed: the other ranks get an error that names the exception, and the states are kept. So
    they are if the process exits without this call.
    """
    contexts.current().close()


def suspend() -> None:
    """Leave the job in order to ``resume`` it later with other machines. Until then rank(), size() and the like return
    the old values; operations raise NotInitializedError."""
    contexts.current().suspend()


def resume(num_workers: int, num_servers: int, global_rank: int = -1) -> None:
    """Join again after ``suspend``, in a job of ``num_workers`` GPU machines and ``num_servers`` CPU machines.

    global_rank: this process's new rank; by default its machine keeps its index. Raises as ``init`` does.
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
    """The number of training processes."""
    return contexts.current().place.size


def local_rank() -> int:
    """This process's number on its machine, from 0 to local_size() - 1."""
    return contexts.current().place.local_rank


def local_size() -> int:
    """The number of training processes on this machine."""
    return contexts.current().place.local_size


def cross_rank() -> int:
    """This machine's number, from 0 to cross_size() - 1."""
    return contexts.current().place.machine_index


def cross_size() -> int:
    """The number of machines with training processes."""
    return contexts.current().place.num_machines


def is_homogeneous() -> bool:
    """True if every machine has the same number of training processes."""
    return contexts.current().place.is_homogeneous


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called it. Raises StallError or PeerLostError."""
    context = contexts.current()
    group = group_of(process_set)
    if group:
        barrier_in_group(context, group)
    else:
        context.session.barrier()


def join(device: int = -1) -> int:
    """Announce that this rank has no more data, and wait until every rank has called join. Returns the last rank.

    Until then the other ranks' reductions go on without this rank; averages still divide by the number of all ranks.
    Operations that need every rank (broadcast, allgather, alltoall, reducescatter) raise JoinedError on the other ranks
    when they wait. ``device`` is Horovod's argument and has no effect. Raises StallError or PeerLostError.
    """
    return contexts.current().join()


def declare(name: str) -> None:
    """For BytePS's scripts. Without effect: a tensor's key follows from its name, not from an order of declarations."""
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
    """Begin to reduce ``tensor`` over all ranks. ``synchronize(handle)`` returns the result, a new tensor.

    tensor: dense, on cpu or cuda, of dtype float16, bfloat16, float32, float64, int8, int16, int32, int64 or uint8; the
    same shape and dtype on all ranks. A CUDA tensor must not change before ``synchronize``; a CPU tensor may change.
    average: divide the sum by size() (floor division for integers). op: Sum, Average, Min, Max or Product instead.
    name: the same on all ranks; tensors of equal shape and dtype without a name are matched in order.
    priority: tensors of higher priority are sent first. Below zero, the first quarter of a tensor is sent in the order
    of the calls, which is the same on all machines. version: BytePS's argument, without effect.
    compression: Compression.none, fp16 or bf16.
    Any thread may call it. Raises NotInitializedError and UsageError (a ValueError).
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
    """Like push_pull_async, but ``synchronize`` writes the result into ``tensor``."""
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
    """Reduce ``tensor`` over all ranks in place, and return it. See push_pull_async for the arguments."""
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
    """The reduction of ``tensor`` over all ranks, a new tensor. Differentiable for Sum and Average.

    See push_pull_async for the arguments. Any thread may call it. Raises NotInitializedError, UsageError (a
    ValueError), and MismatchError, StallError or PeerLostError.

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
    """True if synchronize(handle) would not block. Raises UsageError for an unknown handle. Any thread."""
    context = contexts.current()
    context.session  # noqa: B018  raises NotInitializedError
    operation = context.handles.get(handle)
    if operation.is_done:
        operation.settle()  # so that a tensor reduced in place holds its result
    return operation.is_over


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result: a tensor, a tuple of tensors for a group, or the tensor and the
    received splits for alltoall_async. None for an unknown handle, or one that was synchronized before.

    Any thread may call it. Raises MismatchError, StallError or PeerLostError.

    >>> import torch, byteps_py as bps
    >>> bps.init()
    >>> handle = bps.push_pull_async(torch.tensor([1.0]), name="x")
    >>> bps.synchronize(handle)
    tensor([1.])
    >>> bps.shutdown()
    """
    context = contexts.current()
    context.session  # noqa: B018  raises NotInitializedError
    operation = context.handles.pop(handle)
    return None if operation is None else operation.deliver()


def result_of(handle: int) -> Any:
    """For synchronous functions: ``synchronize`` their own handle. Raises UsageError if a shutdown cleared it."""
    output = synchronize(handle)
    if output is None:
        raise UsageError(f"handle {handle} was cleared by a shutdown in another thread")
    return output
