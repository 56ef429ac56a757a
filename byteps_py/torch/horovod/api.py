"""The job of this process, as BytePS and Horovod name it: init, rank, size, join; and scripts' questions about the
build.

Any thread may call. All functions raise NotInitializedError outside init() … shutdown() and UsageError (a ValueError)
for misuse.

``init(comm=[0, 2])`` begins a job of some of the ranks that a launcher started. That is supported if all of them are on
one machine: they start services of their own, apart from those of the launcher, and the other ranks may do the same.
Across machines only the launcher knows an address for a scheduler.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from byteps_py.config.settings import Settings
from byteps_py.errors import ConfigurationError, UsageError
from byteps_py.torch import timeline
from byteps_py.torch.collectives import context as contexts, torch_rendezvous
from byteps_py.torch.operations.process_sets import (
    ProcessSet,
    add_initial_sets,
    barrier_in_group,
    global_process_set,
    group_of,
    is_communicator,
)

__all__ = [
    "barrier",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "declare",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "resume",
    "rocm_built",
    "shutdown",
    "size",
    "suspend",
]


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
    context.on_open = timeline.set_up
    try:
        context.on_open(context)
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
    if context.is_catching_up:
        return  # the others have gone on from it
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
    """Accepted for BytePS's scripts, and without effect: a tensor's key follows from its name, not from an order of
    declarations."""
    contexts.current().session  # noqa: B018  raises NotInitializedError
    if not name:
        raise UsageError("a tensor's name must not be empty")


# ---- the build ---------------------------------------------------------------------------------------------
# Data go over shared memory and TCP, which Horovod uses Gloo for.


def mpi_built() -> bool:
    """False: MPI is not used."""
    return False


def mpi_enabled() -> bool:
    """False: MPI is not used."""
    return False


def mpi_threads_supported() -> bool:
    """True: mpi4py may be used from any thread, because this package makes no MPI calls.

    Raises NotInitializedError (a ValueError) before init().
    """
    contexts.current().session  # noqa: B018  raises NotInitializedError
    return True


def gloo_built() -> bool:
    """True: TCP is always supported."""
    return True


def gloo_enabled() -> bool:
    """True between init() and shutdown()."""
    return contexts.current().is_open


def nccl_built() -> int:
    """0, which is no version of NCCL: CUDA tensors go through host memory."""
    return 0


def ddl_built() -> bool:
    """False: DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """True if torch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """True if torch is built for ROCm."""
    return torch.version.hip is not None


def rank_in(settings: Settings) -> int:
    """This process's rank according to the environment, if every machine has the same number of ranks."""
    return settings.worker_id * settings.local_size + settings.local_rank


def among(settings: Settings, ranks: Sequence[int]) -> Settings:
    """The settings of a job of the launcher's ranks ``ranks`` alone. ``settings`` itself if ``ranks`` is empty or names
    all ranks.

    Raises UsageError if ``ranks`` are not ascending ranks of this job that include this process's rank, and
    ConfigurationError if they are on several machines.

    >>> among(Settings(local_size=3, local_rank=2, job_id="j"), [0, 2]).local_rank
    1
    """
    size = settings.num_workers * settings.local_size
    me = rank_in(settings)
    given = list(ranks)
    if not given or given == list(range(size)):
        return settings
    if given != sorted(set(given)) or given[0] < 0 or given[-1] >= size:
        raise UsageError(f"comm must be ascending ranks from 0 to {size - 1}, got {given}")
    if me not in given:
        raise UsageError(f"comm={given} does not have this rank, {me}; ranks outside of it must not call init with it")
    if len(given) > 1 and given[0] // settings.local_size != given[-1] // settings.local_size:
        raise ConfigurationError(
            f"comm={given} has ranks of several machines: start a job of these ranks alone, or let all ranks call "
            "init() and give operations a ProcessSet of these"
        )
    digest = hashlib.blake2b(repr(given).encode(), digest_size=6).hexdigest()
    return dataclasses.replace(
        settings,
        scheduler_host="",
        scheduler_port=0,
        num_workers=1,
        num_servers=0,
        worker_id=0,
        local_size=len(given),
        local_rank=given.index(me),
        job_id=f"{settings.job}-among-{digest}",
        socket_name="",
        force_distributed=settings.force_distributed and len(given) > 1,
    )
