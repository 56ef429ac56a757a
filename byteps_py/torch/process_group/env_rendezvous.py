"""The meeting of ranks (``env://``) in a job whose ranks are started again.

torch's rank 0 keeps the store of a job, at a port that all ranks know beforehand. When all ranks are started again, one
that is quicker than rank 0's old process is slow to end meets in the old store, and rank 0 waits in vain in a new one.
So here ranks join the job first, whose scheduler knows who belongs together, and rank 0 says to these where its store
is. That is also right where a spare machine has taken the place of rank 0's. One thread at a time.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore

from byteps_py.system.machine import bindable_host
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.slot_view import TensorRequest

HOLDER = "torch.distributed"
_PLACE_BYTES = 320  # a host name has at most 253
_meetings = 0  # of this process


def meet(url: str, timeout: timedelta = timedelta(minutes=30), **more: Any) -> Iterator[tuple[Store, int, int]]:
    """In place of torch's handler. Yields (store, rank, number of ranks), once. Raises the errors of ``init``."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or "rank=" in url:  # alone, or init_process_group(rank=…)
        torchs = importlib.import_module("torch.distributed.rendezvous")._env_rendezvous_handler
        return torchs(url, timeout=timeout, **more)  # type: ignore[no-any-return]
    return _meet(timeout)


def _meet(timeout: timedelta) -> Iterator[tuple[Store, int, int]]:
    global _meetings
    _meetings += 1
    context = contexts.current()
    context.open(holder=HOLDER)
    session = context.session
    name = f"torch.distributed.rendezvous.{_meetings}"
    try:
        if session.rank == 0:
            host = bindable_host(context.settings)
            store = TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
            _say(context, name, f"{host} {store.port}")
        else:
            host, port = _say(context, name, "").split()
            store = TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
    except BaseException:
        context.release(HOLDER)
        raise
    yield store, session.rank, session.size
    raise RuntimeError("ranks of a job meet once for each init_process_group")


def _say(context: Context, name: str, place: str) -> str:
    """Rank 0's ``place``, on all ranks. The others give ""."""
    own = torch.zeros(_PLACE_BYTES, dtype=torch.uint8, device="cpu")
    own[: len(place)] = torch.tensor(list(place.encode()), dtype=torch.uint8, device="cpu")
    spec = TensorSpec(name, DType.UINT8, (_PLACE_BYTES,), Op.MAX)
    (view,) = context.slot_views([TensorRequest(spec, torch.uint8, ((_PLACE_BYTES,),), own.device)])
    view.contribute([own])
    view.wait()
    return bytes(view.results[0].tolist()).rstrip(b"\0").decode()
