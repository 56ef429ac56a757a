"""The step time of torchft's train_ddp example, with its process group of gloo and with ours, step by step in turns.

    pip install torchft
    .venv/bin/python -m benchmarks.torchft_ddp --replicas 2 --embedding-mb 64 --steps 40

Each replica is one process with two copies of the example's model (a small CNN, and an embedding that is only there to
be sent, of 1 GB in the example), one for each Manager, on random images instead of CIFAR-10, which would have to be
downloaded. Rows: the median and the range of all steps, as rank 0 sees them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

ROOT = Path(__file__).parents[1]
_LIMIT = timedelta(seconds=60)
CONTENDERS = ("gloo", "byteps")


class Net(nn.Module):
    """As torchft's example has it, with an embedding of another size."""

    def __init__(self, embedding_bytes: int) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2, 2)
        )
        self.useless = nn.Embedding(embedding_bytes // 40, 10)
        self.classifier = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.cnn(images), 1)) + self.useless.weight[0]  # type: ignore[no-any-return]


class Contender:
    """A Manager with its model and optimizer."""

    def __init__(self, name: str, replica: int, lighthouse: str, embedding_bytes: int) -> None:
        import torchft

        from byteps_py.torchft import ProcessGroupBytePS

        torch.manual_seed(0)
        net = Net(embedding_bytes)
        local = torch.optim.AdamW(net.parameters())
        kind = torchft.ProcessGroupGloo if name == "gloo" else ProcessGroupBytePS
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = torchft.Manager(
            pg=kind(timeout=_LIMIT),
            min_replica_size=1,
            load_state_dict=lambda state: (net.load_state_dict(state["model"]), local.load_state_dict(state["optim"])),
            state_dict=lambda: {"model": net.state_dict(), "optim": local.state_dict()},
            replica_id=f"{name}_{replica}",
            timeout=_LIMIT,
            quorum_timeout=_LIMIT,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            hostname="127.0.0.1",
        )
        self._net = net
        self._model = torchft.DistributedDataParallel(self.manager, net)
        self._optimizer = torchft.Optimizer(self.manager, local)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
        """Seconds, and the number of replicas that took part."""
        began_s = time.perf_counter()
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(self._model(images), labels).backward()
        self._optimizer.step()
        return time.perf_counter() - began_s, self.manager.num_participants()

    def digest(self) -> float:
        return float(sum(value.double().sum() for value in self._net.state_dict().values()))


def replica_main(task: dict[str, Any]) -> None:
    """One replica. The first prints what it has measured."""
    replica = task["replica"]
    torch.set_num_threads(1)
    contenders = {
        name: Contender(name, replica, address, task["embedding_bytes"])
        for name, address in task["lighthouses"].items()
    }
    generator = torch.Generator().manual_seed(replica)
    images = torch.rand(64, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (64,), generator=generator)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(task["steps"] + task["warm_up"]):
        for name, contender in contenders.items():
            taken_s, participants = contender.step(images, labels)
            if number >= task["warm_up"]:
                assert participants == task["replicas"], f"{name}: {participants} replicas"
                seconds[name].append(taken_s)
    found = {"seconds": seconds, "weights": {name: each.digest() for name, each in contenders.items()}}
    print(json.dumps(found), flush=True)
    sys.stdin.readline()  # others may still be in their last step
    os._exit(0)  # threads of torchft wait for replicas that are gone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--embedding-mb", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        replica_main(json.loads(arguments.task))
        return
    from torchft.coordination import LighthouseServer

    lighthouses = {
        name: LighthouseServer(bind=f"127.0.0.1:{_port()}", min_replicas=arguments.replicas, join_timeout_ms=20_000)
        for name in CONTENDERS
    }
    task = {
        "lighthouses": {name: each.address() for name, each in lighthouses.items()},
        "embedding_bytes": arguments.embedding_mb << 20,
        "steps": arguments.steps,
        "warm_up": arguments.warm_up,
        "replicas": arguments.replicas,
    }
    replicas = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.torchft_ddp", "--task", json.dumps({**task, "replica": replica})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for replica in range(arguments.replicas)
    ]  # fmt: skip
    try:
        lines = [each.stdout.readline() for each in replicas if each.stdout is not None]
        assert all(lines), "a replica has ended: see above"
        found = [json.loads(line) for line in lines]
    finally:
        for each in replicas:
            each.kill()
            each.wait()
        for lighthouse in lighthouses.values():
            lighthouse.shutdown()
    print(f"torchft's train_ddp, {arguments.replicas} replicas, embedding of {arguments.embedding_mb} MiB")
    for name in CONTENDERS:
        taken = [1000 * each for each in found[0]["seconds"][name]]
        print(f"{name:8} {statistics.median(taken):7.1f} ms a step ({min(taken):.1f} to {max(taken):.1f})")
        assert len({each["weights"][name] for each in found}) == 1, f"{name}: replicas differ"


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    main()
