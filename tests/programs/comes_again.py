"""A rank with torch that joins and leaves again and again, mostly with nothing to do, each rank at its own pace.

``comes_again.py SEED TURNS``; run under bpslaunch by tests/jobs/test_failures_machine.py.
"""

from __future__ import annotations

import os
import random
import sys
import time

import torch

import byteps_py as bps


def main(seed: int, turns: int) -> None:
    rank = os.environ["RANK"]
    pace = random.Random(f"{seed} {rank}")
    for turn in range(turns):
        bps.init()
        if turn % 3 == 2:
            total = bps.push_pull(torch.full((5,), float(bps.rank() + turn)), name="x", average=False)
            expected = torch.full((5,), float(sum(rank + turn for rank in range(bps.size()))))
            if not torch.equal(total, expected):
                raise ValueError(f"turn {turn}: {total}, not {expected}")
        if pace.random() < 0.5:
            time.sleep(pace.random() * 0.004)  # not a wait: a shuffle of who leaves first
        bps.shutdown()
    os.write(1, f"{rank}: {turns} turns\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
