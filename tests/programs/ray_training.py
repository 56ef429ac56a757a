"""Trains three times on a Ray cluster of several raylets: undisturbed, with a server's node lost, with a trainer's.

    ray_training.py FOLDER [KIND…]

Each time two trainers and two summation servers begin, each on a node of its own. In the loop, the trainers wait at a
gate while this program takes a node away. Prints ``weights KIND DIGEST`` at the end of each training, and what it saw.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import byteps_py.ray

STEPS, GATE_AT, LIMIT_S = 12, 5, 300.0


@ray.remote(num_cpus=0, resources={"node:__internal_head__": 0.001})  # that node is never lost
class Gate:
    """Where ranks wait in the middle of a training, and leave their results."""

    def __init__(self) -> None:
        self._nodes: dict[int, str] = {}
        self._reached, self._open = asyncio.Event(), asyncio.Event()
        self._results: list[Any] = []

    async def reach(self, rank: int, size: int, node: str) -> None:
        self._nodes[rank] = node
        if len(self._nodes) == size:
            self._reached.set()
        await self._open.wait()

    async def nodes(self) -> dict[int, str]:
        await self._reached.wait()
        return self._nodes

    async def open(self) -> None:
        self._open.set()

    async def tell(self, result: Any) -> None:
        self._results.append(result)

    async def results(self) -> list[Any]:
        return self._results


def train_loop(config: dict[str, Any]) -> None:
    import byteps_py as bps

    bps.init()
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
    optimizer = bps.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01), named_parameters=model.named_parameters(), shadow=True
    )
    run = bps.RunState(model, optimizer)
    begins_at = None
    for step in run.iterations(STEPS):
        begins_at = step if begins_at is None else begins_at
        if step == GATE_AT:
            node = ray.get_runtime_context().get_node_id()
            ray.get(config["gate"].reach.remote(bps.rank(), bps.size(), node))
        inputs = torch.sin(torch.arange(160.0).view(8, 20) * (step + 1) + bps.rank())
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.numpy().tobytes())
    ray.get(config["gate"].tell.remote((bps.rank(), bps.size(), begins_at, found.hexdigest()[:16])))


def wait_for(what: Callable[[], object]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < until_s, "not so in time"
        time.sleep(0.2)


def servers() -> int:
    """CPU machines whose servers are in the running job."""
    members = byteps_py.ray.status()["members"]
    return sum(
        each["kind"] == "server" and each["machine"] == "CPU" and each["alive"] and not each["left"] for each in members
    )


@ray.remote(num_cpus=0, resources={"node:__internal_head__": 0.001})
def fit(kind: str, folder: str, gate: Any) -> None:
    """In a process of its own: adding nodes to the cluster needs this program's main thread."""
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"gate": gate},
        torch_config=byteps_py.ray.BytePSConfig(servers=2),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1, "trainer": 1}),
        run_config=RunConfig(name=kind, storage_path=folder, failure_config=FailureConfig(max_failures=2)),
    )
    trainer.fit()


def train(kind: str, folder: str, meanwhile: Callable[[dict[int, str]], None]) -> None:
    """One training. ``meanwhile(nodes of the ranks)`` runs while they wait at the gate."""
    gate = Gate.remote()
    fitting = fit.remote(kind, folder, gate)
    meanwhile(ray.get(gate.nodes.remote(), timeout=LIMIT_S))
    ray.get(gate.open.remote())
    ray.get(fitting, timeout=LIMIT_S)
    for rank, size, begins_at, digest in sorted(ray.get(gate.results.remote())):
        print(f"weights {kind} rank {rank} of {size} from step {begins_at}: {digest}", flush=True)


def main() -> None:
    folder, *kinds = sys.argv[1:]
    quick = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": quick})
    for _ in range(2):
        cluster.add_node(num_cpus=1, resources={"trainer": 1})
    spare = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address)
    try:

        def scale(nodes: dict[int, str]) -> None:
            wait_for(lambda: servers() == 2)
            print("scaled to", byteps_py.ray.scale(1), servers(), flush=True)
            byteps_py.ray.scale(2)
            wait_for(lambda: servers() == 2)
            print("two servers again", flush=True)

        def lose_server(nodes: dict[int, str]) -> None:
            wait_for(lambda: servers() == 2)
            cluster.remove_node(spare.pop(), allow_graceful=False)
            wait_for(lambda: servers() == 1)
            print("a server's node is lost", flush=True)
            spare.append(cluster.add_node(num_cpus=1))
            wait_for(lambda: servers() == 2)
            print("its server runs on another node", flush=True)

        def lose_trainer(nodes: dict[int, str]) -> None:
            lost = next(node for node in cluster.worker_nodes if node.node_id == nodes[1])
            cluster.remove_node(lost, allow_graceful=False)
            print("a trainer's node is lost", flush=True)
            cluster.add_node(num_cpus=1, resources={"trainer": 1})

        disturbances = {"calm": scale, "server-lost": lose_server, "trainer-lost": lose_trainer}
        for kind in kinds or disturbances:
            train(kind, folder, disturbances[kind])
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
