"""Ranks of different machines talk to each other until one of them is killed, or until their connection breaks.

connected_ends.py all_reduce | push_pull | shares | send_recv | all_gather [broken | cut]

cut: the connection can be made again, and the program ends after some more steps.
"""

from __future__ import annotations

import socket
import sys

import torch
import torch.distributed as dist

import byteps_py as bps
from byteps_py.torch.collectives import context

operation, *rest = sys.argv[1:]
bps.init()
dist.init_process_group("byteps")
rank, size = dist.get_rank(), dist.get_world_size()
tensor = torch.ones(1000 if operation in ("all_reduce", "push_pull") else 3_000_000)
whole = torch.empty(size * tensor.numel())


def go_on() -> None:
    if operation == "send_recv":
        if rank == 0:
            dist.send(tensor, size - 1)
        elif rank == size - 1:
            dist.recv(tensor, 0)
        dist.barrier()
    elif operation == "push_pull":
        bps.push_pull_inplace(tensor, average=True, name="x")
    elif operation == "all_gather":
        dist.all_gather_single(whole, tensor)
    else:
        dist.all_reduce(tensor)


for step in range(1_000_000):
    go_on()
    if step == 5:
        print(f"{rank}: going", flush=True)
        if rest and rank == 0:
            peers = context.current().session.peers
            connection = peers._outboxes[size - 1]  # type: ignore[union-attr]
            if rest == ["broken"]:
                peers.connector.close()  # type: ignore[union-attr]  # nobody can call again
            connection._sockets[0].sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    if step == 200 and rest == ["cut"]:
        break
