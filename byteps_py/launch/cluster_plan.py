"""A whole cluster on this host's loopback: what ``bpslaunch -np RANKS --machines N --servers K`` starts.

Each emulated machine has its own BYTEPS_MACHINE_ID, and otherwise the variables that a user who starts it by hand would
set. Pure, except ``free_port``. Any thread.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from byteps_py.errors import RendezvousError
from byteps_py.exit_status import NO_JOURNAL_STATUS, UNUSABLE_STATUS
from byteps_py.launch.machine_plan import (
    horovod_variables,
    rank_spec,
    scheduler_restarts,
    server_spec,
    services,
    torch_variables,
)
from byteps_py.launch.process_spec import ProcessKind, ProcessSpec, service_argv
from byteps_py.settings import Settings

_TRIES = 200


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """``ranks``: of each GPU machine; ``servers``: CPU machines."""

    ranks: int
    machines: int
    servers: int


def cluster_plan(
    environ: Mapping[str, str],
    command: Sequence[str],
    size: ClusterSize,
    *,
    port: int,
    torch_port: int,
    cores: int,
    token: str,
) -> list[ProcessSpec]:
    """The processes of the cluster in the order in which to start them; ranks are numbered machine by machine.

    ``port``: for the scheduler; ``torch_port``: for torch.distributed, if it is used. ``token`` is a random word, the
    job's id. Raises ConfigurationError.
    """
    ranks, machines, servers = size.ranks, size.machines, size.servers
    common = {
        "DMLC_NUM_WORKER": str(machines),
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "BYTEPS_JOB_ID": token,
    }
    threads = environ.get("OMP_NUM_THREADS") or str(max(1, cores // (ranks * machines)))
    specs: list[ProcessSpec] = []
    gpu_machine_services: list[ProcessSpec] = []
    rank_specs: list[ProcessSpec] = []
    for machine in range(machines):
        env = {
            **common,
            "DMLC_ROLE": "worker",
            "DMLC_WORKER_ID": str(machine),
            "BYTEPS_MACHINE_ID": f"m{machine}",
            "BYTEPS_LOCAL_SIZE": str(ranks),
        }
        settings = Settings.from_env({**environ, **env, "BYTEPS_LOCAL_RANK": "0"})
        if settings.is_alone:
            common.update(DMLC_PS_ROOT_URI="", DMLC_PS_ROOT_PORT="")
            env.update(common)
        socket_token = f"{token}-m{machine}"
        where = f" of machine m{machine}" if machines > 1 else ""
        label = f"-m{machine}" if machines > 1 else ""
        own_services = services(settings, env, socket_token, where, label)
        gpu_machine_services += own_services
        for local_rank in range(ranks):
            rank = len(rank_specs)
            rank_env = {**env, **({"BYTEPS_SOCKET_NAME": f"byteps-{socket_token}-cs"} if own_services else {})}
            place = (local_rank, ranks, machine, machines)
            rank_env |= horovod_variables(*place) | torch_variables(*place, "127.0.0.1", torch_port, {})
            detail = f" (local rank {local_rank}{where})" if machines > 1 else ""
            rank_specs.append(
                rank_spec(
                    f"rank {rank}{detail}",
                    str(rank),
                    command,
                    rank_env,
                    local_rank,
                    reads_stdin=rank == 0,
                    threads=threads,
                )
            )
    if gpu_machine_services:
        specs.append(_scheduler(common, scheduler_restarts(environ)))
    for index in range(servers):
        # It ends with the cluster: no restarted job finds it.
        env = {**common, "DMLC_ROLE": "server", "BYTEPS_MACHINE_ID": f"c{index}", "BYTEPS_SHADOW_KEEP_S": "0"}
        name = f"the summation service of CPU machine c{index}"
        specs.append(server_spec(name, f"ss-c{index}", env))
    return [*specs, *gpu_machine_services, *rank_specs]


def _scheduler(common: Mapping[str, str], restarts: int) -> ProcessSpec:
    env = {**common, "DMLC_ROLE": "scheduler", "BYTEPS_MACHINE_ID": "m0"}
    return ProcessSpec(
        "the scheduler",
        ProcessKind.SERVICE,
        "scheduler",
        service_argv("scheduler"),
        env,
        is_vital=False,
        restarts=restarts,
        waits_for_address=True,
        retry_status=UNUSABLE_STATUS,
        hopeless_status=NO_JOURNAL_STATUS,
    )


def free_port(taken: int = 0) -> int:
    """A free loopback port, other than ``taken``, below the range from which the system assigns ports.

    So only a program that asks for this very port can take it before the scheduler does; then the launcher starts over.
    Raises RendezvousError if it finds none.
    """
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    low, high = (16384, first_ephemeral) if first_ephemeral > 18000 else (32768, 65536)
    for _ in range(_TRIES):
        port = random.SystemRandom().randrange(low, high)
        if port == taken:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue  # the port is in use
        return port
    raise RendezvousError(f"no free loopback port found among {_TRIES} tried between {low} and {high}")
