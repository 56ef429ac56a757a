"""Measure training speed on synthetic images, like the benchmark of BytePS and Horovod.

bpslaunch -np 2 python examples/synthetic_benchmark.py --model resnet50 --batch-size 4 --image-size 64
"""

from __future__ import annotations

import argparse
import statistics
import time

import resnet
import torch
from torch.nn import functional

import byteps_py as bps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(resnet.LAYERS), default="resnet50")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--fp16-pushpull", action="store_true", help="send gradients as float16")
    parser.add_argument("--no-cuda", action="store_true")
    arguments = parser.parse_args()

    bps.init()
    cuda = torch.cuda.is_available() and not arguments.no_cuda
    device = torch.device("cuda", bps.local_rank()) if cuda else torch.device("cpu")
    torch.manual_seed(bps.rank())
    model = resnet.build(arguments.model).to(device)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=bps.Compression.fp16 if arguments.fp16_pushpull else bps.Compression.none,
    )
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    images = torch.randn(arguments.batch_size, 3, arguments.image_size, arguments.image_size, device=device)
    labels = torch.randint(1000, (arguments.batch_size,), device=device)

    def say(line: str) -> None:
        if bps.rank() == 0:
            print(line, flush=True)

    def batches(count: int) -> float:
        """The time in seconds of ``count`` steps."""
        began = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    say(f"Model: {arguments.model}\nBatch size: {arguments.batch_size}\nNumber of {device.type}s: {bps.size()}")
    batches(arguments.num_warmup_batches)
    rates = []
    for number in range(arguments.num_iters):
        seconds = batches(arguments.num_batches_per_iter)
        rates.append(arguments.batch_size * arguments.num_batches_per_iter / seconds)
        say(f"Iter #{number}: {rates[-1]:.1f} img/sec per {device.type}")
    mean = statistics.fmean(rates)
    spread = 1.96 * statistics.pstdev(rates)
    say(f"Img/sec per {device.type}: {mean:.1f} +-{spread:.1f}")
    say(f"Total img/sec on {bps.size()} {device.type}(s): {mean * bps.size():.1f} +-{spread * bps.size():.1f}")
    bps.shutdown()


if __name__ == "__main__":
    main()
