"""Ray Train's TorchTrainer on byteps_py: the backend "byteps" of torch.distributed, with summation servers of Ray's.

``BytePSConfig`` takes the place of ray.train.torch.TorchConfig. The trainer's controller calls ``BytePSBackend`` each
time it has started the workers; its ``ServerPool`` stays from one attempt to the next. ``_TrainContext`` surrounds the
training function in each worker.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import ray
import torch.distributed as dist
from ray.train.torch import TorchConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from byteps_py.errors import BytePSError, ConfigurationError
from byteps_py.ray.server_pool import NAMESPACE, PoolOptions, ServerPool
from byteps_py.system.log import logger
from byteps_py.system.machine import ADDRESS_VARIABLES
from byteps_py.torch_backend import NAME, register
from byteps_py.wording import count_text

#: A busy node takes long to start an actor.
_OTHER_S = 300.0
#: The training function of this worker has returned.
_has_finished = False


@dataclass
class BytePSConfig(TorchConfig):
    """Trains through byteps_py, with summation servers on nodes that have CPUs to spare.

    Attributes:
        servers: summation servers, each on a node without trainers. 0: the trainers' nodes sum.
        resources_per_server: what Ray reserves for each, under Ray's names. "CPU" is also its number of threads. A
            resource of your own, such as {"CPU": 4, "spare": 1}, says which nodes may run one.
        placement_s: seconds for which the job waits at its start until Ray has placed the servers. The others join
            later.
        name: names the job for ``scale`` and ``status``; unique in the Ray cluster. Chosen if empty.
        variables: environment variables of byteps_py for all processes of the job (docs/reference/variables.md).
        timeout_s: as TorchConfig's; at most BYTEPS_STALL_LIMIT_S.

    Raises ConfigurationError. Example: ``TorchTrainer(train_loop, torch_config=BytePSConfig(servers=2), …)``.
    """

    backend: str | None = NAME
    timeout_s: int = 600
    servers: int = 0
    resources_per_server: dict[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    placement_s: float = 30.0
    name: str = ""
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend != NAME:
            raise ConfigurationError(
                f"BytePSConfig(backend={self.backend!r}): its backend is {NAME!r}; use TorchConfig for others"
            )
        if self.init_method != "env":
            raise ConfigurationError(
                f"BytePSConfig(init_method={self.init_method!r}): ranks find each other by MASTER_ADDR and "
                "MASTER_PORT, which is init_method='env'"
            )
        if self.servers < 0:
            raise ConfigurationError(f"BytePSConfig(servers={self.servers}): a job has 0 summation servers or more")
        self.name = self.name or f"byteps-{secrets.token_hex(4)}"

    @property
    def backend_cls(self) -> type[BytePSBackend]:
        return BytePSBackend

    @property
    def train_func_context(self) -> type[_TrainContext]:
        return _TrainContext


class BytePSBackend(TorchConfig().backend_cls):  # type: ignore[misc]
    """In the trainer's controller: sets each attempt's workers up. One thread."""

    def __init__(self) -> None:
        self._pool: Any = None

    def on_start(self, worker_group: Any, backend_config: BytePSConfig) -> None:
        """All workers have started: have the scheduler and the servers, then torch's process group."""
        nodes = worker_group.execute(_node_id)
        machines = machines_of(nodes)
        if self._pool is None:
            self._pool = _new_pool(backend_config)
        start = self._pool.start_job.remote(len(set(machines)), nodes)
        common = ray.get(start, timeout=backend_config.placement_s + _OTHER_S)
        done = [
            worker_group.execute_single_async(rank, _set_variables, {**common, "BYTEPS_MACHINE_ID": machine})
            for rank, machine in enumerate(machines)
        ]
        ray.get(done)
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: BytePSConfig) -> None:
        """The attempt is over. Workers whose training function has returned have left the job. The others are killed
        without leaving it: it then counts as failed, and servers keep what a further attempt goes on from."""
        try:
            has_finished = all(worker_group.execute(_get_finished))
        except ray.exceptions.RayError:  # a worker has died
            return
        if has_finished and self._pool is not None:
            ray.get(self._pool.stop.remote(), timeout=_OTHER_S)
            ray.kill(self._pool)
            self._pool = None


class _TrainContext:
    """Around the training function, in its thread: this rank leaves the job when it ends."""

    def __init__(self) -> None:
        self._inner = TorchConfig().train_func_context()

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Any:
        global _has_finished
        if error is None:
            _leave()
            _has_finished = True
        else:
            # While the exception is in flight, this is no end in order: other ranks raise an error that names it.
            try:
                _leave()
            except BytePSError as other:
                logger.info("this rank has left the job with %s", other)
        return self._inner.__exit__(kind, error, traceback)


def _leave() -> None:
    import byteps_py as bps

    if dist.is_initialized():
        dist.destroy_process_group()
    if bps.is_initialized():
        bps.shutdown()


def machines_of(nodes: Sequence[str]) -> list[str]:
    """The name of each rank's machine. All machines of a job have as many ranks: where nodes have different numbers,
    a node is several machines.

    >>> machines_of(["a", "a", "b", "b"]), machines_of(["a", "a", "a", "b"])
    (['a/0', 'a/0', 'b/0', 'b/0'], ['a/0', 'a/1', 'a/2', 'b/0'])
    """
    size = math.gcd(*(nodes.count(node) for node in set(nodes)))
    return [f"{node}/{nodes[:rank].count(node) // size}" for rank, node in enumerate(nodes)]


def _new_pool(config: BytePSConfig) -> Any:
    """On this process's node, and gone with this process."""
    options = PoolOptions(config.servers, config.resources_per_server, config.placement_s, config.variables)
    node = ray.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    logger.info("job %s: %s", config.name, count_text(config.servers, "summation server"))
    try:
        actor = ray.remote(ServerPool).options(
            num_cpus=0, name=config.name, namespace=NAMESPACE, scheduling_strategy=here
        )
        return actor.remote(config.name, options)
    except ValueError as error:  # Ray's, of a name that is taken
        raise ConfigurationError(
            f"BytePSConfig(name={config.name!r}): a job of this name runs on this Ray cluster: give each its own"
        ) from error


def _node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _set_variables(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    if not any(os.environ.get(name) for name in ADDRESS_VARIABLES):
        os.environ["DMLC_NODE_HOST"] = ray.util.get_node_ip_address()
    register()


def _get_finished() -> bool:
    return _has_finished
