"""Sums of tensors of several sizes, and a broadcast, for some rounds: each is what the ranks' values add up to, bit for
bit. Says so."""

import torch

import byteps_py as bps

ROUNDS = 6
COUNTS = (1000, 100_000, 3_000_017)


def values(rank: int, round_: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * rank + 10 * round_ + count % 7))


def main() -> None:
    bps.init()
    for round_ in range(ROUNDS):
        handles = [
            bps.push_pull_async(values(bps.rank(), round_, count), average=False, name=f"sum of {count}")
            for count in COUNTS
        ]
        for count, handle in zip(COUNTS, handles, strict=True):
            parts = [values(rank, round_, count) for rank in range(bps.size())]
            due = parts[0]
            for part in parts[1:]:
                due = due + part
            assert torch.equal(bps.synchronize(handle), due), (round_, count)
    told = bps.broadcast(values(bps.rank(), 99, COUNTS[-1]), 1, name="told")
    assert torch.equal(told, values(1, 99, COUNTS[-1]))
    print(f"rank {bps.rank()}: all sums are right", flush=True)
    bps.shutdown()


main()
