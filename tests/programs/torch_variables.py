"""A rank that nobody's launcher has started: it has torch's variables, or a process group, and says what job it is in.

``python torch_variables.py HOW``: ``init``: byteps_py.init(), twice; ``group``: torch's group comes first.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import byteps_py as bps


def say(what: str) -> None:
    average = bps.push_pull(torch.tensor([float(bps.rank())]), name="own").item()
    place = f"{bps.rank()} of {bps.size()}, {bps.local_rank()} of {bps.local_size()}, machine {bps.cross_rank()}"
    os.write(1, f"{what}: {place}; average {average:g}\n".encode())


def main() -> None:
    if sys.argv[1] == "group":
        dist.init_process_group("gloo")
        bps.init()
        say("group")
    else:
        bps.init()
        say("first")
        bps.shutdown()
        bps.init()
        dist.init_process_group("byteps")  # in the same job, at the same port
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == bps.size()
        say("second")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    bps.shutdown()


if __name__ == "__main__":
    try:
        main()
    except bps.BytePSError as error:
        os.write(1, f"{type(error).__name__}: {error}\n".encode())
        sys.exit(3)
