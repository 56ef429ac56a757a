"""Sends what FSDP2 gathers and scatters, without ("plain") or with ("kept") ``cache_parameters``.

``python carry_fsdp.py plain|kept WIDTH``. Each rank prints the bytes that it has sent over TCP itself, as the system
counts them: in a forward pass, in its backward pass, in a forward pass with the same parameters, and in one after a
step.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import byteps_py as bps

#: Of ``tcpi_bytes_sent`` in ``struct tcp_info``, see linux/tcp.h; ``tcpi_bytes_retrans`` is next.
_BYTES_SENT_AT = 200
LAYERS = 3


def tcp_bytes_sent() -> int:
    """By all connections of this process that are open, once the others have it."""
    total, until_s = 0, time.monotonic() + 10
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            if sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM:
                while struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))) != (0,):
                    if time.monotonic() > until_s:
                        raise SystemExit("what was sent has not arrived")
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sent, sent_again = struct.unpack_from("QQ", info, _BYTES_SENT_AT)
                total += sent - sent_again
    return total


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("byteps")
    width = int(sys.argv[2])
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if sys.argv[1] == "kept":
        bps.parallel.fsdp.cache_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(1, width)
    outputs: list[torch.Tensor] = []
    passes: list[Callable[[], object]] = [
        lambda: outputs.append(model(x)),
        lambda: outputs[0].sum().backward(),
        lambda: model(x),
        lambda: (optimizer.step(), model(x)),
    ]
    sent = []
    for each in passes:
        before = tcp_bytes_sent()
        each()
        sent.append(tcp_bytes_sent() - before)
    print(json.dumps({"rank": dist.get_rank(), "sent": sent}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
