"""A rank that adds up large tensors, again and again, until something ends that: prints ``RANK: going``, and
the error."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from byteps_py.errors import CommunicationError


def main() -> None:
    dist.init_process_group("byteps")
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(1_000_000):
        tensor = torch.full((1_000_000,), float(rank))
        try:
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            if turn % 3 == 1:
                work.get_future().wait()
            else:
                work.wait()
        except (CommunicationError, RuntimeError) as error:
            os.write(1, f"{rank}: {type(error).__name__}: {error}\n".encode())
            raise
        assert torch.equal(tensor, torch.full_like(tensor, sum(range(size))))
        if turn == 20:
            os.write(1, f"{rank}: going\n".encode())


if __name__ == "__main__":
    main()
