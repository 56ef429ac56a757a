"""A Horovod training script in which only the import was changed: a small convolutional net for handwritten digits.

The digits (8x8 pixels) are part of scikit-learn, so nothing is downloaded.

    bpslaunch -np 2 python examples/horovod_mnist.py
    bpslaunch -np 2 python examples/horovod_mnist.py --use-adasum --fp16-allreduce
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import byteps_py.torch as hvd  # was: import horovod.torch as hvd


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--test-batch-size", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine the ranks' steps by Adasum")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    return parser.parse_args()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(32 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def datasets() -> tuple[Dataset, Dataset]:
    """1,437 training images and 360 test images."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


def train(
    epoch: int, model: nn.Module, optimizer: optim.Optimizer, loader: DataLoader, args: argparse.Namespace
) -> None:
    model.train()
    loader.sampler.set_epoch(epoch)  # another order in each epoch
    for batch, (data, target) in enumerate(loader):
        if args.cuda:
            data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if hvd.rank() == 0 and batch % args.log_interval == 0:
            print(f"epoch {epoch}  batch {batch}/{len(loader)}  loss {loss.item():.4f}", flush=True)


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


def test(model: nn.Module, loader: DataLoader, args: argparse.Namespace) -> None:
    model.eval()
    loss = right = 0.0
    with torch.no_grad():
        for data, target in loader:
            if args.cuda:
                data, target = data.cuda(), target.cuda()
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            right += output.argmax(1).eq(target).sum().item()
    # Each rank has tested its part. The parts have equal lengths.
    loss = metric_average(loss / len(loader.sampler), "avg_loss")
    accuracy = metric_average(right / len(loader.sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"test: loss {loss:.4f}, accuracy {accuracy:.2%}", flush=True)


def main() -> None:
    args = parse()
    args.cuda = not args.no_cuda and torch.cuda.is_available()

    hvd.init()
    torch.manual_seed(args.seed)
    if args.cuda:
        torch.cuda.set_device(hvd.local_rank())
        torch.cuda.manual_seed(args.seed)
    torch.set_num_threads(1)

    train_set, test_set = datasets()
    samplers = [DistributedSampler(part, num_replicas=hvd.size(), rank=hvd.rank()) for part in (train_set, test_set)]
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=samplers[0])
    test_loader = DataLoader(test_set, batch_size=args.test_batch_size, sampler=samplers[1])

    model = Net()
    if args.cuda:
        model.cuda()
    # Adasum needs no larger learning rate for more ranks.
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = optim.SGD(model.parameters(), lr=args.lr * scale, momentum=args.momentum)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    for epoch in range(1, args.epochs + 1):
        train(epoch, model, optimizer, train_loader, args)
        test(model, test_loader, args)


if __name__ == "__main__":
    main()
