"""What ranks of two machines send to each other, and their communication services: sums, messages, gathers, and sums
that are scattered, each bit for bit what it must be. Says so, and how much a rank has read by RDMA."""

import functools
import gc
import operator
import os
import warnings

import torch
import torch.distributed as dist

import byteps_py.torch_backend  # noqa: F401
from byteps_py.dataplane.rdma_lane import RdmaLane

ROUNDS = 3
COUNT = 3_000_016  # of which each of two ranks gets whole cache lines


def values(rank: int, round_: int, count: int = COUNT) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * rank + round_))


def main() -> None:
    dist.init_process_group("byteps")
    rank, size = dist.get_rank(), dist.get_world_size()
    for round_ in range(ROUNDS):
        all_values = [values(each, round_) for each in range(size)]
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        on_machines = [functools.reduce(operator.add, all_values[at : at + local]) for at in range(0, size, local)]
        total = functools.reduce(operator.add, on_machines)
        mine = values(rank, round_)
        dist.all_reduce(mine)
        assert torch.equal(mine, total), "all_reduce"
        came = torch.empty(COUNT)
        sending = dist.isend(values(rank, round_), (rank + 1) % size)
        dist.recv(came, (rank - 1) % size)
        sending.wait()
        assert torch.equal(came, all_values[(rank - 1) % size]), "recv"
        whole = [torch.empty(COUNT) for _ in range(size)]
        dist.all_gather(whole, values(rank, round_))
        assert all(map(torch.equal, whole, all_values)), "all_gather"
        part = torch.empty(COUNT // size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.reduce_scatter_tensor(part, values(rank, round_))
        assert torch.equal(part, total.chunk(size)[rank]), "reduce_scatter"
        exchanged = torch.empty(COUNT)
        dist.all_to_all_single(exchanged, values(rank, round_))
        assert torch.equal(exchanged, torch.cat([each.chunk(size)[rank] for each in all_values])), "all_to_all"
    read = sum(each.bytes_read for each in gc.get_objects() if isinstance(each, RdmaLane))
    print(f"rank {rank}: all is right; read by RDMA: {read} bytes", flush=True)
    dist.destroy_process_group()


main()
