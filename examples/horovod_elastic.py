"""An elastic Horovod script in which only the import was changed. It trains on digits, and commits every few batches.

After a failure, training goes on from the last commit with the remaining ranks. --kill-at makes the last rank kill
itself, and --fail-at simulates a failure that all ranks survive:

    bpslaunch -np 2 --elastic python examples/horovod_elastic.py --kill-at 7
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import byteps_py.torch as hvd  # was: import horovod.torch as hvd


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--batches-per-commit", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.01, help="for one rank")
    parser.add_argument("--fail-at", type=int, default=-1, help="batch of the first epoch in which all ranks fail once")
    parser.add_argument("--kill-at", type=int, default=-1, help="batch of the first epoch in which the last rank dies")
    return parser.parse_args()


def main() -> None:
    args = parse()
    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    data = TensorDataset(images, labels)
    sampler = hvd.elastic.ElasticSampler(data, seed=1)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    failures = [args.fail_at]

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        for state.epoch in range(state.epoch, args.epochs):
            first = state.batch  # the sampler has only the rest of the epoch
            for state.batch, (inputs, target) in enumerate(loader, start=first):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), target)
                loss.backward()
                if state.epoch == 0 and state.batch == args.kill_at and 0 < hvd.rank() == hvd.size() - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if state.epoch == 0 and state.batch in failures:
                    failures.clear()
                    raise hvd.HorovodInternalError(f"made up, in batch {state.batch}")
                optimizer.step()
                state.sampler.record_batch(state.batch, args.batch_size)
                if state.batch % args.batches_per_commit == args.batches_per_commit - 1:
                    state.batch += 1
                    state.commit()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch + 1}: loss {loss.item():.4f}", flush=True)
            state.batch = 0
            state.sampler.set_epoch(state.epoch + 1)

    def on_reset() -> None:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()
        if hvd.rank() == 0:
            print(f"joined again: {hvd.size()} ranks, epoch {state.epoch + 1}, batch {state.batch}", flush=True)

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
    state.register_reset_callbacks([on_reset])
    train(state)

    with torch.no_grad():
        part = slice(hvd.rank(), None, hvd.size())
        right = model(images[part]).argmax(1).eq(labels[part]).sum()
    right = hvd.allreduce(right, op=hvd.Sum, name="right")
    if hvd.rank() == 0:
        print(f"accuracy {int(right) / len(labels):.2%}", flush=True)


if __name__ == "__main__":
    main()
