"""A Horovod ImageNet script in which only the import was changed. Images and labels are synthetic.

It uses gradient accumulation, learning-rate warm-up and decay, metrics averaged over ranks, and checkpoints on rank 0
from which a job can continue. With --model tiny --image-size 32 it runs on a CPU in seconds:

    bpslaunch -np 2 python examples/horovod_imagenet.py --model tiny --image-size 32 --images 64 --epochs 2
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import resnet
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import byteps_py.torch as hvd  # was: import horovod.torch as hvd

CLASSES = 10


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", choices=["tiny", *resnet.LAYERS])
    parser.add_argument("--images", type=int, default=4096, help="in the training set; the other has a quarter")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--checkpoints", type=Path, help="folder for checkpoints, which a later run goes on from")
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--batches-per-allreduce", type=int, default=1, help="batches a rank takes for one step")
    parser.add_argument("--use-adasum", action="store_true")
    parser.add_argument("--sync-bn", action="store_true", help="batch statistics of all ranks together")
    parser.add_argument("--num-groups", type=int, default=0, help="groups in which gradients travel")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--val-batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--base-lr", type=float, default=0.0125, help="for one rank")
    parser.add_argument("--warmup-epochs", type=float, default=5)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=0.00005)
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


class MadeUpImages(Dataset):
    """Noise around one pattern per class. Image number i is the same in every run."""

    def __init__(self, count: int, size: int, offset: int = 0) -> None:
        self.count = count
        self.offset = offset
        self.patterns = torch.randn(CLASSES, 3, size, size, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(self.offset + index)
        label = index % CLASSES
        return self.patterns[label] + torch.randn(self.patterns[label].shape, generator=generator), label


def build(name: str) -> nn.Module:
    if name != "tiny":
        return resnet.build(name, CLASSES)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        resnet.Bottleneck(16, 8, 1), resnet.Bottleneck(32, 16, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES),
    )  # fmt: skip


class Metric:
    """An average over batches and ranks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sum = 0.0
        self.count = 0

    def update(self, value: torch.Tensor) -> None:
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name).item()
        self.count += 1

    @property
    def average(self) -> float:
        return self.sum / max(1, self.count)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.argmax(1).eq(target).float().mean()


class Training:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        train_set = MadeUpImages(args.images, args.image_size)
        val_set = MadeUpImages(args.images // 4, args.image_size, offset=args.images)
        self.sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
        val_sampler = DistributedSampler(val_set, num_replicas=hvd.size(), rank=hvd.rank())
        self.loader = DataLoader(train_set, args.batch_size * args.batches_per_allreduce, sampler=self.sampler)
        self.val_loader = DataLoader(val_set, args.val_batch_size, sampler=val_sampler)

        self.model = build(args.model)
        if args.sync_bn:
            self.model = hvd.SyncBatchNorm.convert_sync_batchnorm(self.model)
        if args.cuda:
            self.model.cuda()
        optimizer = optim.SGD(
            self.model.parameters(), lr=args.base_lr * self.scale, momentum=args.momentum, weight_decay=args.wd
        )
        self.optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=self.model.named_parameters(),
            compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
            backward_passes_per_step=args.batches_per_allreduce,
            op=hvd.Adasum if args.use_adasum else hvd.Average,
            gradient_predivide_factor=args.gradient_predivide_factor,
            num_groups=args.num_groups,
        )

    @property
    def scale(self) -> int:
        """The factor of the learning rate. Adasum needs no larger rate for more ranks."""
        return self.args.batches_per_allreduce * (1 if self.args.use_adasum else hvd.size())

    def checkpoint(self, epoch: int) -> Path:
        return self.args.checkpoints / f"checkpoint-{epoch}.pt"

    def resume(self) -> int:
        """Rank 0 reads the last checkpoint, and the others receive it. Returns the number of completed epochs."""
        done = 0
        if hvd.rank() == 0 and self.args.checkpoints:
            self.args.checkpoints.mkdir(parents=True, exist_ok=True)
            done = max((n for n in range(1, self.args.epochs + 1) if self.checkpoint(n).exists()), default=0)
        done = int(hvd.broadcast(torch.tensor(done), root_rank=0, name="resume_from_epoch"))
        if done and hvd.rank() == 0:
            checkpoint = torch.load(self.checkpoint(done))
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)
        return done

    def adjust_learning_rate(self, epoch: int, batch: int) -> None:
        """Raise the rate over the first epochs from one rank's to all ranks'; later divide it by ten, three times."""
        if epoch < self.args.warmup_epochs:
            progress = (epoch + (batch + 1) / len(self.loader)) / self.args.warmup_epochs
            factor = (1 + progress * (hvd.size() - 1)) / hvd.size()
        else:
            factor = 10.0 ** -sum(epoch >= limit for limit in (30, 60, 80))
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.base_lr * self.scale * factor

    def train(self, epoch: int) -> None:
        self.model.train()
        self.sampler.set_epoch(epoch)
        losses, hits = Metric("train_loss"), Metric("train_accuracy")
        for batch, (data, target) in enumerate(self.loader):
            self.adjust_learning_rate(epoch, batch)
            if self.args.cuda:
                data, target = data.cuda(), target.cuda()
            self.optimizer.zero_grad()
            parts = math.ceil(len(data) / self.args.batch_size)
            for part in range(parts):
                here = slice(part * self.args.batch_size, (part + 1) * self.args.batch_size)
                output = self.model(data[here])
                loss = F.cross_entropy(output, target[here])
                hits.update(accuracy(output, target[here]))
                losses.update(loss)
                (loss / parts).backward()
            self.optimizer.step()
        self.report("train", epoch, losses, hits)

    def validate(self, epoch: int) -> None:
        self.model.eval()
        losses, hits = Metric("val_loss"), Metric("val_accuracy")
        with torch.no_grad():
            for data, target in self.val_loader:
                if self.args.cuda:
                    data, target = data.cuda(), target.cuda()
                output = self.model(data)
                losses.update(F.cross_entropy(output, target))
                hits.update(accuracy(output, target))
        self.report("validate", epoch, losses, hits)

    def report(self, what: str, epoch: int, losses: Metric, hits: Metric) -> None:
        if hvd.rank() == 0:
            print(f"{what} epoch {epoch + 1}: loss {losses.average:.4f}, accuracy {hits.average:.2%}", flush=True)

    def save(self, epoch: int) -> None:
        if hvd.rank() == 0 and self.args.checkpoints:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, self.checkpoint(epoch + 1))


def main() -> None:
    args = parse()
    args.cuda = not args.no_cuda and torch.cuda.is_available()
    hvd.init()
    torch.manual_seed(args.seed)
    if args.cuda:
        torch.cuda.set_device(hvd.local_rank())
    else:
        torch.set_num_threads(1)
    training = Training(args)
    done = training.resume()
    if hvd.rank() == 0 and done:
        print(f"goes on after epoch {done}", flush=True)
    for epoch in range(done, args.epochs):
        training.train(epoch)
        training.validate(epoch)
        training.save(epoch)


if __name__ == "__main__":
    main()
