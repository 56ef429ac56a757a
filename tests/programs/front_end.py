"""A rank with torch: what the front end says when it is used wrongly, and that it goes on. Then a real DataLoader.

Every line it prints begins with the rank; run under bpslaunch by tests/jobs/test_failures.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, TensorDataset

import byteps_py as bps
from byteps_py.errors import BytePSError


def say(text: str) -> None:
    os.write(1, f"{os.environ['BYTEPS_LOCAL_RANK']}: {text}\n".encode())  # in one piece: others write, too


def report(what: str, call: Callable[[], object]) -> None:
    """Say which error ``call`` raises."""
    try:
        call()
        text = "no error"
    except BytePSError as error:
        text = f"{type(error).__name__}: {error}"
    say(f"{what}: {text}")


def main() -> None:
    ones = torch.ones(3)
    report("before init", lambda: bps.push_pull(ones, name="x"))
    report("rank before init", bps.rank)
    bps.init()
    bps.init()
    report("init twice", lambda: bps.push_pull(ones, name="x"))
    report("shape", lambda: bps.push_pull(torch.ones(3 + bps.rank()), name="y"))
    report("name again", lambda: bps.push_pull(ones, name="y"))
    handle = bps.push_pull_async(ones, name="z")
    report("root", lambda: bps.broadcast(ones, root_rank=bps.size(), name="r"))
    report("pending", lambda: bps.synchronize(handle))
    bps.shutdown()
    report("after shutdown", lambda: bps.push_pull(ones, name="x"))
    report("old handle", lambda: bps.synchronize(handle))
    bps.shutdown()
    bps.init()
    bps.suspend()
    report("suspended", lambda: bps.push_pull(ones, name="x"))
    bps.resume(1, 0)
    report("resumed", lambda: bps.push_pull(ones, name="x"))

    def fetch(batch: list[torch.Tensor]) -> torch.Tensor:  # in a forked process
        try:
            bps.push_pull(ones, name="x")
            return torch.zeros(0)
        except BytePSError as error:
            return torch.tensor(list(str(error).encode()), dtype=torch.uint8)

    loader = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2, num_workers=1, collate_fn=fetch)
    model = torch.nn.Linear(2, 1)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    told = ""
    for batch in loader:
        told = bytes(batch.tolist()).decode()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    say(f"forked: {told}")
    report("trained", lambda: bps.push_pull(ones, name="x"))

    if bps.rank() == 1:
        raise ValueError("the training data is bad")
    report("other rank", lambda: bps.push_pull(ones, name="x"))


if __name__ == "__main__":
    main()
