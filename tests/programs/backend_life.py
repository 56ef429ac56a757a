"""A rank by torchrun: the backend's life, with nothing imported but torch. Prints ``RANK: done`` at its end."""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

assert "byteps_py.torch" not in sys.modules


def total() -> float:
    tensor = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return tensor[0].item()


def main() -> None:
    expected = sum(range(1, int(os.environ["WORLD_SIZE"]) + 1))
    dist.init_process_group("byteps")
    assert dist.get_backend() == "byteps"
    assert total() == expected
    import byteps_py.torch as bps

    assert bps.is_initialized()
    kept = dist.group.WORLD
    dist.destroy_process_group()
    assert not bps.is_initialized()
    with pytest.raises(bps.UsageError, match="was destroyed"):
        kept.allreduce([torch.ones(1)])

    dist.init_process_group("byteps", timeout=timedelta(seconds=30))  # again, and init() joins in
    assert total() == expected
    bps.init()
    dist.destroy_process_group()
    assert bps.push_pull(torch.ones(2), average=False, name="x")[0].item() == bps.size()

    dist.init_process_group("byteps")  # the session is there already
    assert total() == expected
    group = dist.new_group()
    group.abort()
    with pytest.raises(bps.CommunicationError, match="was aborted"):
        dist.all_reduce(torch.ones(1), group=group)
    for count in (1, 200_000):
        other = dist.new_group()
        for _ in range(2):
            dist.all_reduce(torch.ones(count), group=other)
        work = dist.all_reduce(torch.ones(count), group=other, async_op=True) if dist.get_rank() == 0 else None
        timer = threading.Timer(0.2, other.abort)
        timer.start()
        timer.join()
        if work is not None:
            with pytest.raises(bps.CommunicationError, match="was aborted"):
                work.wait()
    dist.barrier()
    dist.destroy_process_group()
    bps.shutdown()

    dist.init_process_group("byteps")
    if dist.get_rank() == 0:  # what was sent arrives, though the sender leaves at once
        for value in (1.0, 2.0):
            dist.send(torch.full((100_000,), value), 1)
    elif dist.get_rank() == 1:
        for value in (1.0, 2.0):
            tensor = torch.empty(100_000)
            dist.recv(tensor, 0)
            assert tensor.sum().item() == 100_000 * value
    dist.destroy_process_group()
    os.write(1, f"{os.environ['RANK']}: done\n".encode())


if __name__ == "__main__":
    main()
