"""Train a classifier of handwritten digits on real data (scikit-learn's digits, which ships with the package).

The program runs alone, and unchanged on any number of workers and servers:

    python examples/digits.py
    bpslaunch -np 2 python examples/digits.py
    bpslaunch -np 2 --machines 2 --servers 2 python examples/digits.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import byteps_py as bps


def read_data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """1,437 training images and 360 test images: float32[n, 64] from 0 to 1, and their int64[n] labels."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Dropout(0.2), nn.Linear(1024, 10)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, arguments: argparse.Namespace) -> float:
    """Returns images per second, over all ranks."""
    images, labels, _, _ = read_data()
    began = time.perf_counter()
    seen = 0
    for epoch in range(arguments.epochs):
        # All ranks draw the same order, and each takes its own part of each batch.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        per_step = arguments.batch_size * bps.size()
        total = 0.0
        steps = len(order) // per_step
        for step in range(steps):
            start = step * per_step + bps.rank() * arguments.batch_size
            mine = order[start : start + arguments.batch_size]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()  # gradients are sent while the backward pass still runs
            optimizer.step()
            total += loss.item()
            seen += per_step
        mean_loss = bps.push_pull(torch.tensor(total / steps), average=True, name="epoch loss").item()
        if bps.rank() == 0 and (epoch + 1) % max(1, arguments.epochs // 10) == 0:
            print(f"epoch {epoch + 1:3d}  loss {mean_loss:.4f}", flush=True)
    return seen / (time.perf_counter() - began)


def test(model: nn.Module) -> float:
    """The fraction of test images that are classified correctly. Each rank tests a part."""
    _, _, images, labels = read_data()
    model.eval()
    with torch.no_grad():
        right = (model(images[bps.rank() :: bps.size()]).argmax(1) == labels[bps.rank() :: bps.size()]).sum()
    return int(bps.push_pull(right, average=False, name="right")) / len(labels)


def digest_of(model: nn.Module) -> str:
    """A digest that is equal for two models exactly if all their weights are the same, bit for bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def time_of_reduction(model: nn.Module, repeats: int = 20) -> float:
    """The median time in seconds of summing a tensor of the model's size over all ranks."""
    gradient = torch.ones(sum(p.numel() for p in model.parameters()))
    times = []
    for _ in range(repeats):
        bps.barrier()
        began = time.perf_counter()
        bps.push_pull_inplace(gradient, average=True, name="timing")
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--json", type=Path, help="write the outcome here (rank 0)")
    arguments = parser.parse_args()

    bps.init()
    torch.manual_seed(bps.rank())  # dropout differs between ranks; the weights are rank 0's, see below
    model = build_model()
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = bps.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=arguments.lr), named_parameters=model.named_parameters()
    )
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    throughput = train(model, optimizer, arguments)
    accuracy = test(model)
    digest = digest_of(model)
    if bps.broadcast_object(digest, root_rank=0) != digest:
        raise SystemExit(f"rank {bps.rank()} ended with other weights than rank 0")
    seconds = time_of_reduction(model)
    if bps.rank() == 0:
        print(f"test accuracy {accuracy:.2%}")
        print(
            f"{throughput:.0f} images/s on {bps.size()} ranks; one reduction of the model takes {seconds * 1e3:.1f} ms"
        )
        print(f"weights {digest}, the same on every rank")
        if arguments.json:
            outcome = {
                "accuracy": accuracy, "images_per_s": throughput, "reduction_s": seconds, "weights": digest
            }  # fmt: skip
            arguments.json.write_text(json.dumps(outcome))
    bps.shutdown()


if __name__ == "__main__":
    main()
