"""A server comes while a job trains: from then on each machine carries what the formula in
docs/explanation/placement.md says for the cluster as it is now. Real processes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from support.breaking import environ_of, launch, service

from byteps_py.config.settings import Settings
from byteps_py.placement.placement_table import PlacementTable
from byteps_py.placement.shares import Optimum
from byteps_py.scheduler import query
from byteps_py.tensors import key_of

MACHINES, STEPS = 2, 10  # steps of a stretch
BYTES = 4 << 20
PARTITION = 16 << 10
STOP = 8  # bytes of a small tensor, which is reduced once more in each stretch
COUNTS = ("bytes_received", "bytes_sent", "bytes_local")
#: By address, what a server was given by other machines, what it answered them, and what its own machine gave it.
Carried = dict[str, tuple[int, ...]]


def carried(members: list[dict[str, Any]]) -> Carried:
    return {each["address"]: tuple(each[name] for name in COUNTS) for each in members if each["kind"] == "server"}


def given(found: Carried) -> int:
    return sum(received + local for received, _, local in found.values())


def known(settings: Settings, nbytes: int) -> Carried:
    """The status, once the heartbeats have reported that many bytes. Nothing is in flight."""
    deadline = time.monotonic() + 60
    while True:
        found = carried(query.to_dict(query.status(settings, 30))["members"])
        if given(found) == nbytes and all(received == sent for received, sent, _ in found.values()):
            return found
        assert time.monotonic() < deadline, found


def whole(nbytes: int) -> int:
    """Without what a server has of the small tensor."""
    return nbytes // PARTITION * PARTITION


def loads(found: Carried) -> list[int]:
    """Each server's part of the tensor, all of which every machine gave in every step. Sorted."""
    return sorted(whole((received + local) // (MACHINES * STEPS)) for received, _, local in found.values())


def test_when_a_server_has_joined_all_carry_what_the_formula_says_for_the_new_cluster(tmp_path: Path) -> None:
    environ = {"BYTEPS_PARTITION_BYTES": str(PARTITION), "PS_HEARTBEAT_TIMEOUT": "30", "PS_HEARTBEAT_INTERVAL": "0.05"}
    file = tmp_path / "report"
    with launch(f"-np 1 --machines {MACHINES} --report {file}", "stretches", "0", str(BYTES // 8), **environ) as job:
        assert job.process.stdin is not None
        job.until("0: stretch 0")
        own = environ_of(job.pid("stretches", DMLC_WORKER_ID="0"))
        print(file=job.process.stdin, flush=True)
        job.until("0: stretch 1")
        before = known(Settings.from_env(own), MACHINES * (STEPS * BYTES + STOP))
        address = {
            name: own[name]
            for name in ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "BYTEPS_JOB_ID", "BYTEPS_LOCAL_SECRET")
        }
        cluster = {"DMLC_NUM_WORKER": str(MACHINES), "BYTEPS_MACHINE_ID": "spare"}
        with service("server", **address, **cluster, **environ) as server:
            job.until("worker 0 WARNING: epoch 2: ", "worker 1 WARNING: epoch 2: ")
            print(file=job.process.stdin, flush=True)
            job.until("0: stretch 2")
            assert (job.end(), server.end()) == (0, 0)
    total = carried(json.loads(file.read_text())["members"])
    after = {name: tuple(map(int.__sub__, now, before.get(name, (0, 0, 0)))) for name, now in total.items()}

    # Each byte goes once from each machine to a server, and from there once back; on a busy machine a few partitions
    # go again (seen: five of 5,120 pushes). Less than one per step, so that a server's part is still known to the byte.
    exact = MACHINES * (STEPS * BYTES + 2 * STOP)
    assert 0 <= given(after) - exact < STEPS * PARTITION, after
    assert all(abs(received - sent) < STEPS * PARTITION for received, sent, _ in after.values()), after
    # The table's rule, to the byte.
    cpu, *gpus = Optimum(MACHINES, 1).server_weights
    table = PlacementTable(enumerate(Optimum(MACHINES, 0).server_weights), PARTITION)
    for name, nbytes in (("stop", STOP), ("gradient", BYTES)):
        table.add([(key_of(name), nbytes, 8)])
    assert loads(before) == [BYTES // 2] * 2 == sorted(whole(table.load(server)) for server in (0, 1))
    table.rebalance([(2, cpu), *enumerate(gpus)])
    assert loads(after) == sorted(whole(table.load(server)) for server in range(3))
    # The formula, but for what stays where it is: 1/32 of a share, and 32 KB (docs/explanation/placement.md).
    shares = [share * BYTES for share in Optimum(MACHINES, 1).shares]
    for load, best in zip(loads(after), sorted(shares), strict=True):
        assert abs(load - best) <= MACHINES * (min(shares) / 32 + (32 << 10)), loads(after)
