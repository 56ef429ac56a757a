"""One rank of benchmarks/local_sgd.py: the GPT of examples/gpt.py. Arguments: the contender, width and layers, steps
from one outer step to the next, steps of a turn, the learning rate of the outer step and its Nesterov momentum."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional

import byteps_py as bps
from benchmarks.turns import orders
from examples.gpt import GPT, random_batch, read_text

CONTEXT, _SEQUENCES, _HELD_OUT_BATCHES = 64, 8, 40
_LIMIT = timedelta(seconds=120)  # of torchft
#: How gradients travel, where they do in each step.
GRADIENTS = {
    "fp16": bps.Compression.fp16,
    "int8": bps.Compression.int8,
    "float8": bps.Compression.float8,
    "thc": bps.Compression.thc(),
    "dithering": bps.Compression.dithering(7),
    "onebit": bps.Compression.onebit(error_feedback=True),
    "topk": bps.Compression.topk(0.01, error_feedback=True),
    "randomk": bps.Compression.randomk(0.01, error_feedback=True),
    "powersgd": bps.Compression.powersgd(4),
}


def _diloco(name: str, model: nn.Module, inner: torch.optim.Optimizer, every: int, lr: float, momentum: float) -> Any:
    outer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
    compression = {
        "diloco": bps.Compression.none,
        "diloco_int8": bps.Compression.with_error_feedback(bps.Compression.int8),
        "diloco_topk": bps.Compression.topk(0.03, bits=2),
    }
    return bps.local.DiLoCo(model, inner, outer, every=every, compression=compression[name])


def _begin_torchft(
    name: str, model: nn.Module, inner: torch.optim.Optimizer, every: int, lr: float, momentum: float
) -> Callable[[], object]:
    """torchft's DiLoCo, whose outer steps are made by hooks of ``inner``. Returns what ends it. The first rank has the
    lighthouse, too."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first, port, own = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ["OWN_ADDRESS"]
    outer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
    states: dict[str, Any] = {"model": model, "inner": inner, "outer": outer}

    def load(saved: dict[str, Any]) -> None:
        for key, each in states.items():
            each.load_state_dict(saved[key])

    lighthouse = rank or LighthouseServer(bind=f"{first}:{port}", min_replicas=size, join_timeout_ms=60_000)
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_LIMIT),
        use_async_quorum=False,
        init_sync=False,  # all begin with the same model; its checkpoints would be looked for at names of hosts
        min_replica_size=size,
        load_state_dict=load,
        state_dict=lambda: {key: each.state_dict() for key, each in states.items()},
        timeout=_LIMIT,
        quorum_timeout=_LIMIT,
        connect_timeout=_LIMIT,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=f"http://{first}:{port}",
        replica_id=f"{name}_{rank}",
        hostname=own,
    )
    diloco = DiLoCo(
        manager, [model], inner, outer, sync_every=every, use_bucketization=True, should_quantize=name.endswith("int8")
    )
    diloco.__enter__()
    kept = lighthouse, store, diloco  # which end with their last references
    return lambda: (manager.shutdown(wait=False), kept)


def main() -> None:
    name, *numbers = sys.argv[1:]
    width, layers, every, steps = map(int, numbers[:4])
    lr, momentum = map(float, numbers[4:])
    torch.set_num_threads(1)
    letters, data, held_out = read_text()
    torch.manual_seed(0)
    model = GPT(len(letters), CONTEXT, width, layers, heads=4)
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    forward: nn.Module = model
    if name == "gloo":
        dist.init_process_group("gloo")
        rank, optimizer = dist.get_rank(), inner
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(None, fp16_compress_hook)
        forward = ddp
    elif name.startswith("torchft"):
        rank, optimizer = int(os.environ["RANK"]), inner
        end = _begin_torchft(name, model, inner, every, lr, momentum)
    else:
        bps.init()
        rank = bps.rank()
        if name in GRADIENTS:
            bps.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = bps.DistributedOptimizer(inner, model.named_parameters(), GRADIENTS[name])
        else:
            optimizer = _diloco(name, model, inner, every, lr, momentum)

    def loss_of(source: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        inputs, targets = random_batch(source, _SEQUENCES, CONTEXT, generator)
        return functional.cross_entropy(forward(inputs).flatten(0, 1), targets.flatten())

    own = torch.Generator().manual_seed(1 + rank)

    def train() -> dict[str, float]:
        began_s = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(data, own).backward()
            optimizer.step()
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        return {"ms": (time.perf_counter() - began_s) * 1e3 / steps, "peak_gb": peak_gb}

    def evaluate() -> float:
        if name.startswith("diloco"):
            optimizer.synchronize()
        with torch.no_grad():
            losses = [loss_of(held_out, torch.Generator().manual_seed(i)) for i in range(_HELD_OUT_BATCHES)]
        return float(torch.stack(losses).mean())

    does: dict[str, Callable[[], object]] = {"steps": train, "loss": evaluate}
    with orders() as words:
        for word, answer in words:
            answer(does[word]())
    if name == "gloo":
        dist.destroy_process_group()
    elif name.startswith("torchft"):
        end()
        os._exit(0)  # its threads may wait for ranks that are gone
    else:
        bps.shutdown()


if __name__ == "__main__":
    main()
