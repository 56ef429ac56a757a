"""The meetings of ranks that torch.distributed has to do with. One thread at a time.

``complete`` forms the job of ranks that have only torch's variables, or only a process group of torch.distributed.
Kubernetes operators, DeepSpeed's launcher and scripts that start their own processes set RANK and WORLD_SIZE, and no
more. Then nobody has said which ranks share a machine: the ranks exchange that through torch's store. ``init`` and
``init_process_group("byteps")`` use this.

``meet`` is ``env://`` in a job whose ranks are started again. torch's rank 0 keeps the store of a job, at a port that
all ranks know beforehand. When all ranks are started again, one that is quicker than rank 0's old process is slow to
end meets in the old store, and rank 0 waits in vain in a new one. So here ranks join the job first, whose scheduler
knows who belongs together, and rank 0 says to these where its store is. That is also right where a spare machine has
taken the place of rank 0's.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from byteps_py.config import launchers
from byteps_py.config.settings import Settings
from byteps_py.errors import ConfigurationError, RendezvousError
from byteps_py.system.machine import bindable_host, machine_id
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.group_history import begin_history
from byteps_py.torch.collectives.slot_view import TensorRequest

if TYPE_CHECKING or dist.is_available():
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

    from byteps_py.torch.collectives.meeting_store import MeetingStore

#: The store of this process's world. Rank 0 serves it to the others, so it stays until the process ends.
_stores: dict[launchers.TorchWorld, Store] = {}
_rounds = 0  # jobs that this process has formed so far: all ranks form as many, each under keys of its own


def complete(settings: Settings) -> Settings:
    """``settings``, which the environment has given, with torch's facts about ranks, if there are no others: a process
    group that exists, or RANK and WORLD_SIZE. All ranks call it. Blocks until all have come.

    Raises ConfigurationError for variables that are incomplete or contradict each other, and RendezvousError.
    """
    if not is_single_rank(settings):
        return settings
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        store = dist.distributed_c10d._get_default_store()
        return discover_machines(settings, store, dist.get_rank(), dist.get_world_size())
    world = launchers.torch_world(os.environ)
    if world is None:
        return settings
    return discover_machines(settings, _store(world, settings.start_timeout_s), world.rank, world.size)


def count_rounds(at_least: int = 0) -> int:
    """The number of jobs that this process has formed so far; made ``at_least`` as large."""
    global _rounds
    _rounds = max(_rounds, at_least)
    return _rounds


def is_single_rank(settings: Settings) -> bool:
    """True if ``settings`` have no rank beside this one, so that torch may know more."""
    return settings.num_workers * settings.local_size == 1 and not settings.elastic


def discover_machines(settings: Settings, store: Store, rank: int, size: int) -> Settings:
    """Settings with machines and local ranks that the ranks exchange through the store. Raises ConfigurationError, and
    RendezvousError if some rank does not come."""
    global _rounds
    _rounds += 1
    store = PrefixStore(f"byteps/{_rounds}/", store)
    store.set(f"machine/{rank}", machine_id(settings) + launchers.local_group(os.environ, rank, size))
    if rank == 0:
        store.set("job", uuid.uuid4().hex)
    machines = [_get(store, f"machine/{other}", other, size) for other in range(size)]
    order = list(dict.fromkeys(machines))
    local_size = size // len(order)
    if machines != [machine for machine in order for _ in range(local_size)]:
        counts = ", ".join(str(machines.count(machine)) for machine in order)
        raise ConfigurationError(
            f"{len(order)} machines have {counts} ranks: each must have the same number of ranks, and ranks must be "
            "numbered machine by machine"
        )
    # A job with a scheduler is named by its address, which servers know, too, and which MASTER_ADDR and _PORT give.
    has_scheduler = len(order) > 1 or settings.num_servers > 0
    return dataclasses.replace(
        settings,
        num_workers=len(order),
        worker_id=order.index(machines[rank]),
        local_size=local_size,
        local_rank=rank % local_size,
        job_id=settings.job_id or ("" if has_scheduler else _get(store, "job", 0, size)),
    )


def _get(store: Store, key: str, rank: int, size: int) -> str:
    try:
        value: bytes = store.get(key)
        return value.decode(errors="replace")
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {rank} of {size} has not come to torch's store ({_first_line(error)}): start {size} processes, each "
            "with its own RANK, and call init() in all of them"
        ) from None


def _store(world: launchers.TorchWorld, timeout_s: float) -> Store:
    """torch's store at MASTER_ADDR and MASTER_PORT, which ``init_process_group`` in this process then shares."""
    if world not in _stores:
        try:
            _stores[world] = TCPStore(
                world.host,
                world.port,
                is_master=world.rank == 0,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, OSError) as error:
            whose = "can't listen there" if world.rank == 0 else "does not reach rank 0 there"
            raise RendezvousError(
                f"rank {world.rank} of WORLD_SIZE={world.size} {whose}: MASTER_ADDR={world.host}, "
                f"MASTER_PORT={world.port} ({_first_line(error)}). Give all ranks the address of rank 0's machine and "
                "a free port, and start all of them"
            ) from None
    return _stores[world]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


HOLDER = "torch.distributed"
_PLACE_BYTES = 320  # a host name has at most 253
_meetings = 0  # of this process
#: The store of the latest meeting. torch's own stores, which stand on it, do not keep what is Python.
_latest: MeetingStore | None = None
#: The time of one attempt to reach rank 0.
_CONNECT_SLICE = timedelta(seconds=5)


def meet(url: str, timeout: timedelta = timedelta(minutes=30), **more: Any) -> Iterator[tuple[Store, int, int]]:
    """In place of torch's handler. Yields (store, rank, number of ranks), once. Raises the errors of ``init``."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or "rank=" in url:  # alone, or init_process_group(rank=…)
        torchs = importlib.import_module("torch.distributed.rendezvous")._env_rendezvous_handler
        return torchs(url, timeout=timeout, **more)  # type: ignore[no-any-return]
    return _meet(timeout)


def _meet(timeout: timedelta) -> Iterator[tuple[Store, int, int]]:
    global _meetings, _latest
    _meetings += 1
    context = contexts.current()
    context.open(holder=HOLDER)
    session, number = context.session, _meetings
    try:
        store = _latest = MeetingStore(_new_store(context, number, timeout))
    except BaseException:
        context.release(HOLDER)
        raise
    history = begin_history(context, lambda: store.move(_new_store(context, number, timeout)))
    if number > 1:
        history.refuse("init_process_group() was called more than once")
    if os.environ.get("TORCH_DIST_INIT_BARRIER") == "1":
        history.refuse("TORCH_DIST_INIT_BARRIER=1 has ranks wait for each other in torch's store")
    yield store, session.rank, session.size
    raise RuntimeError("ranks of a job meet once for each init_process_group")


def _new_store(context: Context, meeting: int, timeout: timedelta) -> TCPStore:
    """The store that rank 0 serves to the others. All ranks call it."""
    name = f"torch.distributed.rendezvous.{meeting}"
    if context.session.rank == 0:
        host = bindable_host(context.settings)
        store = TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
        _say(context, name, f"{host} {store.port}")
        return store
    host, port = _say(context, name, "").split()
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            store = TCPStore(host, int(port), None, False, _CONNECT_SLICE, wait_for_workers=False)
        except (RuntimeError, OSError):
            context.session.hosts_changed()  # reads what has come meanwhile: rank 0 may be lost
            context.session.check_open()
            if time.monotonic() > deadline:
                raise
        else:
            store.set_timeout(timeout)
            return store


def _say(context: Context, name: str, place: str) -> str:
    """Rank 0's ``place``, on all ranks. The others give ""."""
    own = torch.zeros(_PLACE_BYTES, dtype=torch.uint8, device="cpu")
    own[: len(place)] = torch.tensor(list(place.encode()), dtype=torch.uint8, device="cpu")
    spec = TensorSpec(name, DType.UINT8, (_PLACE_BYTES,), Op.MAX)
    request = TensorRequest(spec, torch.uint8, ((_PLACE_BYTES,),), own.device)
    (view,) = context.slot_views([request], answers_newcomers=True)
    view.contribute([own])
    view.wait()
    return bytes(view.results[0].tolist()).rstrip(b"\0").decode()
