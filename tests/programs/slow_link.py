"""Two ranks sum one tensor, then rank 0 sends it to rank 1 and ends: slow_link.py ELEMENTS."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import byteps_py as bps
import byteps_py.torch_backend


def main() -> None:
    tensor = torch.arange(int(sys.argv[1]), dtype=torch.float32)
    bps.init()
    total = bps.push_pull(tensor, average=False, name="tensor")
    if not torch.equal(total, 2 * tensor):
        raise SystemExit("the sum has wrong values")
    dist.init_process_group("byteps")
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    else:
        arrived = torch.empty_like(tensor)
        dist.recv(arrived, 0)
        if not torch.equal(arrived, tensor):
            raise SystemExit("another tensor has arrived")
    print(f"rank {dist.get_rank()}: summed and sent", flush=True)
    dist.destroy_process_group()
    bps.shutdown()


if __name__ == "__main__":
    main()
