"""A job's scheduler, and its summation servers: actors that Ray places where CPUs are free, and starts again.

``ServerPool`` is an actor of the trainer's controller, on the controller's node. It runs the scheduler, whose address
stays the same when Ray starts the trainers again, so that servers find the restarted job. Each server is an actor of
its own, outside the trainers' nodes, with the CPUs that it asks for: one that Ray can't place yet waits in Ray's queue,
and joins the running job once CPUs come free. They are no placement group, because Ray keeps the CPUs of a group until
the driver ends, also after its trainer has died; those of actors are free at once.

All actors are single-threaded. ``scale`` and ``status`` may be called by any thread of any process of the cluster.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from byteps_py.config.settings import Settings
from byteps_py.errors import RendezvousError, UsageError
from byteps_py.launch.process_guard import die_with
from byteps_py.launch.process_plan import free_port
from byteps_py.scheduler import query
from byteps_py.system.log import logger
from byteps_py.system.machine import ADDRESS_VARIABLES
from byteps_py.wording import count_text

#: Ray's namespace of all pools: `scale` finds them from any driver.
NAMESPACE = "byteps_py"
#: A server's node may be taken away and given back many times.
_RESTARTS = -1
_END_S = 15.0
#: A server that leaves moves its keys first, within a step.
_DRAIN_S = 120.0
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """``servers``: summation servers to begin with; ``resources``: of each, as Ray names them; ``placement_s``: seconds
    for which the job waits at its start for Ray to place them; ``variables``: of all processes of the job."""

    servers: int = 0
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    placement_s: float = 30.0
    variables: Mapping[str, str] = field(default_factory=dict)


class SummationServer:
    """An actor: runs a summation service, and dies when it fails, so that Ray starts the actor again."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._is_leaving = False
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> str:
        """Start the service unless it runs. Returns the node's id."""
        if self._process is None or self._process.poll() is not None:
            self._process = _start_program("byteps_py.server", {**self._variables, "DMLC_ROLE": "server"})
            threading.Thread(target=self._watch, args=(self._process,), daemon=True).start()
        return str(ray.get_runtime_context().get_node_id())

    def leave(self) -> None:
        """Move this server's keys to the others, and end. Raises TimeoutExpired of subprocess."""
        self._is_leaving = True
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(_DRAIN_S)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if status and not self._is_leaving:
            logger.warning("the summation service has ended with status %d: Ray is to start it again", status)
            os._exit(1)  # an actor that ends in order is not started again


class ServerPool:
    """An actor: one job's scheduler, and the handles of its servers."""

    def __init__(self, job: str, options: PoolOptions) -> None:
        self._job, self._options = job, options
        self._wanted = options.servers
        self._servers: list[Any] = []
        self._scheduler: subprocess.Popen[bytes] | None = None
        self._trainer_nodes: Sequence[str] = ()
        self._variables = {
            "BYTEPS_SECRET": secrets.token_hex(32),
            **options.variables,
            "BYTEPS_JOB_ID": job,
            "DMLC_PS_ROOT_URI": ray.util.get_node_ip_address(),
            "DMLC_PS_ROOT_PORT": str(free_port()),
        }

    def start_job(self, machines: int, trainer_nodes: Sequence[str]) -> dict[str, str]:
        """Start the scheduler, and the servers that don't run yet, for trainers on these nodes. Returns the trainers'
        variables.

        Waits ``placement_s`` at most for Ray to place the servers; the job begins with those that it has placed.
        Raises RendezvousError if the scheduler of the attempt before does not end.
        """
        self._trainer_nodes = tuple(dict.fromkeys(trainer_nodes))
        self._end_scheduler()
        self._add_servers()
        placed = self._placed(self._options.placement_s if self._has_other_nodes() else 0.0)
        if machines == 1 and not placed:  # nobody would need a scheduler
            return {"BYTEPS_SECRET": self._variables["BYTEPS_SECRET"], **self._options.variables}
        variables = {**self._variables, "DMLC_NUM_SERVER": str(placed)}
        told = {**variables, "DMLC_ROLE": "scheduler", "DMLC_NUM_WORKER": str(machines)}
        self._scheduler = _start_program("byteps_py.launch", told)
        return variables

    def scale(self, servers: int) -> int:
        """Have ``servers`` of them: ask Ray for more, or let the last ones leave. Returns how many Ray has placed."""
        self._wanted = servers
        self._add_servers()
        leaving, self._servers = self._servers[servers:], self._servers[:servers]
        answers = {server.start.remote(): server for server in leaving}
        there, _ = ray.wait(list(answers), num_returns=len(answers), timeout=_ANSWER_S) if answers else ([], [])
        for answer in there:
            try:
                ray.get(answers[answer].leave.remote(), timeout=_DRAIN_S)
            except (ray.exceptions.RayError, subprocess.TimeoutExpired) as error:
                logger.warning("a summation server has ended before its keys had moved; others go on: %s", error)
        for server in leaving:  # also those that Ray has not placed yet
            ray.kill(server)
        return self._placed(_ANSWER_S)

    def status(self) -> dict[str, Any]:
        """The scheduler's status of the job, as `bps status --json` prints it."""
        return query.to_dict(query.status(Settings.from_env({**self._variables, "DMLC_ROLE": "server"})))

    def stop(self) -> None:
        """End all processes. The job is over."""
        for server in self._servers:
            ray.kill(server)
        self._servers = []
        self._end_scheduler()

    def _add_servers(self) -> None:
        resources = dict(self._options.resources)
        cpus = resources.pop("CPU", 0.0)
        threads = {"BYTEPS_SERVER_ENGINE_THREAD": str(max(1, int(cpus)))}
        options: dict[str, Any] = {
            "num_cpus": cpus,
            "num_gpus": resources.pop("GPU", 0.0),
            "memory": resources.pop("memory", 0.0) or None,
            "resources": resources or None,
            "max_restarts": _RESTARTS,
            "scheduling_strategy": "SPREAD",
        }
        if self._trainer_nodes:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(self._trainer_nodes)})"}
        while len(self._servers) < self._wanted:
            actor = ray.remote(SummationServer).options(**options)
            self._servers.append(actor.remote({**threads, **self._variables}))

    def _has_other_nodes(self) -> bool:
        """Nodes that run no trainer, and so may run a server. Ray may get some later."""
        return any(node["Alive"] and node["NodeID"] not in self._trainer_nodes for node in ray.nodes())

    def _placed(self, timeout_s: float) -> int:
        """The number of servers that run, after ``timeout_s`` at most."""
        if not self._servers:
            return 0
        answers = [server.start.remote() for server in self._servers]
        ready, _ = ray.wait(answers, num_returns=len(answers), timeout=timeout_s)
        placed = sum(_has_answered(answer) for answer in ready)
        if placed < len(answers):
            logger.warning(
                "%d of %s have been placed: the others join when Ray has nodes with %s free for them that run no "
                "trainer", placed, count_text(len(answers), "summation server"), dict(self._options.resources),
            )  # fmt: skip
        return placed

    def _end_scheduler(self) -> None:
        """It ends by itself when its job has ended, or failed."""
        if self._scheduler is None:
            return
        try:
            self._scheduler.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._scheduler.terminate()
            try:
                self._scheduler.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._scheduler.kill()
                raise RendezvousError("the scheduler of the attempt before did not end; it was killed") from None
        self._scheduler = None


def _has_answered(answer: Any) -> bool:
    """False if the actor has died, or is being started again."""
    try:
        ray.get(answer)
    except ray.exceptions.RayError:
        return False
    return True


def _start_program(module: str, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A program of this package, which dies with this process. The main thread calls."""
    environ = {**os.environ, **variables}
    if not any(environ.get(name) for name in ADDRESS_VARIABLES):
        environ["DMLC_NODE_HOST"] = ray.util.get_node_ip_address()
    environ.setdefault("BYTEPS_MACHINE_ID", str(ray.get_runtime_context().get_node_id()))
    argv = [sys.executable, "-P", "-m", module]
    return subprocess.Popen(
        argv, env=environ, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with(os.getpid())
    )


def find_pool(job: str = "") -> Any:
    """The handle of the job's pool; of the only one, if ``job`` is empty. Raises UsageError."""
    entries = ray.util.list_named_actors(all_namespaces=True)
    jobs = sorted(entry["name"] for entry in entries if entry["namespace"] == NAMESPACE)
    if job not in jobs and (job or len(jobs) != 1):
        which = f"no job {job!r} runs" if job else "which job? Give its name" if jobs else "no job runs"
        raise UsageError(f"{which} with byteps_py.ray on this Ray cluster; jobs: {', '.join(jobs) or 'none'}")
    return ray.get_actor(job or jobs[0], namespace=NAMESPACE)


def scale(servers: int, job: str = "") -> int:
    """Change the number of summation servers of a running job. Returns how many Ray has placed.

    More than there are join as soon as Ray has CPUs for them. Those that are too many move their keys to the others
    within a step, and give their CPUs back to Ray. ``job`` is the name of BytePSConfig; the only one by default. Call
    ``ray.init`` first; any thread. Raises UsageError if there is no such job, or if ``servers`` is negative.

    Example: ``byteps_py.ray.scale(4)``.
    """
    if servers < 0:
        raise UsageError(f"scale({servers}): a job has 0 summation servers or more")
    return int(ray.get(find_pool(job).scale.remote(servers)))


def status(job: str = "") -> dict[str, Any]:
    """The state of a running job, with all its processes, as `bps status --json` prints it. Raises UsageError if there
    is no such job, and RendezvousError if its scheduler does not answer."""
    found: dict[str, Any] = ray.get(find_pool(job).status.remote(), timeout=_ANSWER_S)
    return found
