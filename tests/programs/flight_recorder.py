"""Ranks of a job with operations of every kind; then, by argument: "signal" (each sends itself SIGUSR1, for which some
have handlers already), "missing" (rank 2 leaves a collective out), "another" (rank 2 calls another one), "hang" (as
"missing", until the program is killed; Python does not run on rank 2)."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import byteps_py.torch as bps
from byteps_py.errors import StallError
from byteps_py.parallel import collectives
from byteps_py.torch.collectives import context as contexts

CULPRIT = 2
WAIT = timedelta(seconds=3)


def handle(number: int, frame: object) -> None:
    print(f"rank {bps.rank()}: its own handler", flush=True)


def main(how: str) -> None:
    launched_as = int(os.environ["BYTEPS_LOCAL_RANK"])
    if launched_as == 0:
        signal.signal(signal.SIGUSR1, handle)
    elif launched_as == 1:
        faulthandler.register(signal.SIGUSR1, sys.stdout)
    elif launched_as == 2:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    bps.init()
    dist.init_process_group("byteps")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    for turn in range(3):
        every_kind(mesh, turn)
    store = dist.distributed_c10d._get_default_store()
    if how == "signal":
        os.kill(os.getpid(), signal.SIGUSR1)
    elif how == "hang":
        print(f"rank {rank}: hangs", flush=True)
        if rank == CULPRIT:
            ctypes.PyDLL(None).sleep(1000)  # it does not release the GIL
        dist.all_reduce(torch.ones(8, 4))
    elif rank != CULPRIT:
        stall(dist.all_reduce(torch.ones(8, 4), async_op=True))
    elif how == "another":
        stall(dist.broadcast(torch.ones(5), 1, async_op=True))
    else:
        store.wait([f"stalled {rank}" for rank in range(size) if rank != CULPRIT])
        contexts.current().session.flight.dump.dump()
    store.set(f"done {rank}", "")
    store.wait([f"done {rank}" for rank in range(size)])


def stall(work: dist.Work) -> None:
    try:
        work.wait(WAIT)
    except StallError as error:
        print(f"rank {bps.rank()}: {error}", flush=True)
    dist.distributed_c10d._get_default_store().set(f"stalled {bps.rank()}", "")


def every_kind(mesh: dist.DeviceMesh, turn: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    names = ["early", "late"]
    handles = [bps.push_pull_async(torch.ones(1000), name=name) for name in (names if rank else names[::-1])]
    for each in handles:
        bps.synchronize(each)
    bps.allgather(torch.ones(rank + 1), name="rows")
    bps.allreduce(torch.ones(3), name="awaited")
    dist.all_reduce(torch.ones(8, 4))
    dist.broadcast(torch.ones(5), 1)
    collectives.all_gather_single(torch.empty(size, 6), torch.ones(6), None)
    collectives.reduce_scatter_single(torch.empty(3), torch.ones(size * 3), None)
    dist.all_to_all([torch.empty(1 + rank) for _ in range(size)], [torch.ones(1 + peer) for peer in range(size)])
    dist.all_gather([torch.empty(2) for _ in range(size)], torch.ones(2))
    dist.all_gather([torch.empty(peer + 1) for peer in range(size)], torch.ones(rank + 1))
    dist.gather(torch.ones(2), [torch.empty(2) for _ in range(size)] if rank == 0 else None)
    dist.scatter(torch.empty(2), [torch.ones(2) for _ in range(size)] if rank == 1 else None, src=1)
    dist.reduce(torch.ones(2), 1)
    for name in ("dp", "tp"):
        dist.all_reduce(torch.ones(7, dtype=torch.bfloat16), group=mesh.get_group(name))
    sent = dist.isend(torch.full((3, 3), float(turn)), (rank + 1) % size, tag=turn)
    dist.recv(torch.empty(9), (rank - 1) % size, tag=turn)
    sent.wait()
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
