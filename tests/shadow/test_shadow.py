"""A job whose machines all die, and that goes on from its last step: real schedulers, servers, services and ranks."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest
from support.breaking import Job, command, environ_of
from support.clusters import ROOT
from support.processes import kill
from support.shadowed_cluster import LAUNCH, PROGRAM, ShadowedCluster, digests

STEPS = 24
HELD = r"step \d+ held"
ALL_CODED = {"BYTEPS_MIN_COMPRESS_BYTES": "0"}


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as found:
        yield found


def undisturbed(optimizer: str, machines: int, servers: int, steps: int = STEPS, ranks: int = 1) -> dict[int, str]:
    """What a job has that nothing happens to. ``ranks``: of each machine."""
    words = ["-np", str(ranks), "--machines", str(machines), "--servers", str(servers)]
    with command(*LAUNCH, *words, sys.executable, str(PROGRAM), optimizer, str(steps), **ALL_CODED) as job:
        assert job.end() == 0, job.text
        return digests(job.text)


@pytest.mark.parametrize(
    ("optimizer", "machines", "servers"),
    [
        ("adamw", 2, 1),
        pytest.param("adamw", 1, 2, marks=pytest.mark.long),
        pytest.param("sgd", 1, 1, marks=pytest.mark.long),
        pytest.param("sgd", 2, 2, marks=pytest.mark.slow),
        pytest.param("adamw-in-backward", 2, 1, marks=pytest.mark.long),
        pytest.param("adamw+int8", 2, 1, marks=pytest.mark.slow),
        pytest.param("sgd+topk", 3, 2, marks=pytest.mark.long),
        pytest.param("lamb+int8", 3, 2, marks=pytest.mark.long),
        pytest.param("lamb", 2, 1, marks=pytest.mark.long),
        pytest.param("adagrad", 3, 2, marks=pytest.mark.long),
    ],
)
def test_a_job_that_is_killed_goes_on_from_its_last_step(
    stack: contextlib.ExitStack, optimizer: str, machines: int, servers: int
) -> None:
    ranks = 2 if (machines, servers) == (1, 2) else 1
    expected = undisturbed(optimizer, machines, servers, ranks=ranks)
    # Attached objects do not fit into a partition, and come in pieces.
    more = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_LOCAL_SIZE": str(ranks), **ALL_CODED}
    cluster = ShadowedCluster(stack, machines, servers, **more)
    scheduler, *killed = cluster.start(optimizer, "100000", "0.3")
    killed[0].until("step 9:")
    kill_and_go_on(cluster, scheduler, killed, optimizer, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "machines", "servers", "before", "after"),
    [
        pytest.param("lamb", 3, 2, "machine", "machine", marks=pytest.mark.long),
        ("adamw-in-backward", 2, 2, "machine", "sharded"),
        pytest.param("adamw", 2, 1, "machine", "machine", marks=pytest.mark.long),
        pytest.param("adagrad", 2, 1, "sharded", "machine", marks=pytest.mark.long),
    ],
)
def test_states_on_each_machine_are_copied_once(
    stack: contextlib.ExitStack, optimizer: str, machines: int, servers: int, before: str, after: str
) -> None:
    """The next job may keep them otherwise."""
    expected = undisturbed(optimizer, machines, servers)
    cluster = ShadowedCluster(stack, machines, servers, BYTEPS_PARTITION_BYTES="4096", BYTEPS_HOSTED_STATES=before)
    scheduler, *killed = cluster.start(optimizer, "100000", "0.3")
    killed[0].until("step 9:")
    cluster.change(BYTEPS_HOSTED_STATES=after)
    kill_and_go_on(cluster, scheduler, killed, optimizer, expected)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 1], ids=["another one is left", "it was the only one"])
def test_copies_of_a_killed_server_are_made_again(stack: contextlib.ExitStack, count: int) -> None:
    """``count``: of GPU machines, and of CPU machines."""
    expected = undisturbed("adamw", count, count, steps=2 * STEPS)
    cluster = ShadowedCluster(stack, count, count)
    scheduler, *machines = cluster.start("adamw", "100000", "0.1")
    machines[0].until("step 3:")
    kill(cluster.servers[0].pid("byteps_py.server"))
    machines[0].until("step 8:")
    cluster.held_step(9)
    kill_and_go_on(cluster, scheduler, machines, "adamw", expected)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.long)])
def test_with_two_copies_a_server_and_all_machines_may_die_at_once(stack: contextlib.ExitStack, count: int) -> None:
    """``count``: of GPU machines, and of CPU machines."""
    expected = undisturbed("adamw", count, count)
    cluster = ShadowedCluster(stack, count, count, BYTEPS_SHADOW_COPIES="2")
    scheduler, *machines = cluster.start("adamw", "100000", "0.3")
    machines[0].until("step 9:")
    lost = cluster.servers.pop(0)
    kill(lost.pid("byteps_py.server"))
    cluster.change(DMLC_NUM_SERVER=str(count - 1))
    kill_and_go_on(cluster, scheduler, machines, "adamw", expected)


@pytest.mark.slow
@pytest.mark.parametrize("shadow", [True, pytest.param(False, marks=pytest.mark.long)], ids=["shadow", "no states"])
def test_a_job_goes_on_at_once_where_all_but_the_servers_was_killed(stack: contextlib.ExitStack, shadow: bool) -> None:
    """The scheduler, too, and the servers have not noticed yet that nobody is left."""
    expected = undisturbed("adamw", 2, 1)
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    cluster = ShadowedCluster(stack, 2, 1, BYTEPS_JOURNAL_DIR=folder)
    first = cluster.start("adamw", "100000", "0.3")
    first[1].until("step 9:" if shadow else "restored at")
    for job in first:
        job.close()
    before = digests(first[1].text)
    again = cluster.start("adamw", str(max(expected)))
    for job in again:
        assert job.end() == 0, job.text
    assert cluster.servers[0].end() == 0, cluster.servers[0].text
    begun = next(line.split()[-1] for line in again[1].text.splitlines() if line.startswith("restored at"))
    if shadow:
        assert 9 <= int(begun) <= max(before) + 1
    start = int(begun) if begun != "None" else 0
    assert digests(again[1].text) == {step: expected[step] for step in range(start + 1, max(expected) + 1)}


def kill_and_go_on(
    cluster: ShadowedCluster, scheduler: Job, killed: list[Job], optimizer: str, expected: dict[int, str]
) -> None:
    """Kill all machines. The next job ends with ``expected``."""
    for job in killed:
        job.close()
    assert scheduler.end() == 1
    for server in cluster.servers:
        server.until("are kept for 600 s for a restarted job")
    before = digests(killed[0].text)
    again = cluster.start(optimizer, str(max(expected)))
    for job in again:
        assert job.end() == 0, job.text
    for server in cluster.servers:
        assert server.end() == 0, server.text
        assert "the job has failed: PeerLostError" not in server.said[-1], "that of the run before"
    begun = int(next(line for line in again[1].text.splitlines() if line.startswith("restored at")).split()[-1])
    assert 9 <= begun <= max(before) + 1
    assert digests(again[1].text) == {step: expected[step] for step in range(begun + 1, max(expected) + 1)}


@pytest.mark.parametrize("servers", [1, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.slow
def test_an_elastic_job_goes_on_from_its_last_step_without_a_machine(servers: int) -> None:
    program = ROOT / "tests" / "programs" / "shadowed_elastic.py"
    words = ["--elastic", "-np", "1", "--machines", "3", "--servers", str(servers)]
    with command(*LAUNCH, *words, sys.executable, str(program), "40") as job:
        job.until(*(f"rank {rank} of 3 step 20:" for rank in range(3)))
        for pid in job.pids():
            if environ_of(pid).get("BYTEPS_MACHINE_ID") == "m2":
                kill(pid)
        assert job.end() == 0, job.text
    seen: dict[str, set[str]] = {}  # by number of ranks and step
    begun = []
    for line in job.text.splitlines():
        match line.replace(":", "").split():
            case ["rank", _, "of", size, "step", step, digest]:
                seen.setdefault(f"{size}/{step}", set()).add(digest)
            case ["rank", _, "of", "2", "begins", "at", step, digest]:
                begun.append((int(step), digest))
    assert all(len(found) == 1 for found in seen.values())  # all ranks have the same
    assert len(begun) == 2
    assert begun[0] == begun[1]
    last = max(int(key.split("/")[1]) for key in seen if key.startswith("3/"))
    assert last - 1 <= begun[0][0] <= last + 1  # no step is lost but one that was under way
    assert seen.get(f"3/{begun[0][0]}", {begun[0][1]}) == {begun[0][1]}
    assert "2/40" in seen


@pytest.mark.slow
def test_states_stay_until_training_is_said_to_be_done(stack: contextlib.ExitStack) -> None:
    cluster = ShadowedCluster(stack, 1, 1)
    cluster.program = ROOT / "tests" / "programs" / "shadow_endings.py"
    [server] = cluster.servers
    statuses = {"raise": 1, "exit-0-in-try": 0, "exit-3-in-try": 3, "exit-0": 0, "fall-off": 0, "at-exit": 0}
    ended = 0
    for way, status in statuses.items():
        _, machine = cluster.start(way)
        assert machine.end() == status, machine.text
        ended = check_goes_on(machine.text, ended)
        is_failure = way in ("raise", "exit-3-in-try")
        why = "the job has failed" if is_failure else "the job is over, and not all ranks called shutdown()"
        assert why in server.until("are kept for 600 s for a restarted job")
    _, machine = cluster.start("finish-and-exit")
    assert machine.end() == 0, machine.text
    check_goes_on(machine.text, ended)
    assert server.end() == 0, server.text


def check_goes_on(text: str, ended: int) -> int:
    """From the last step of a program that ended after ``ended`` of them, or from the one that it knew to be held: what
    it sent last may be lost with it. Returns after which step it has ended itself."""
    restored, ends = (int(re.findall(f"{what} ([0-9]+)", text)[0]) for what in ("restored at", "ends after"))
    assert max(0, ended - 2) <= restored <= ended, text
    assert ends == restored + 4
    return ends


def survives(cluster: ShadowedCluster, what: str, step: str = HELD, servers: int = 0) -> None:
    """Wait until ``bps status`` says so, and has so many CPU machines."""
    until_s = time.monotonic() + 60
    while True:
        said = cluster.bps("status")
        count = len(re.findall(r"^server +CPU .* alive", said, re.MULTILINE))
        if re.search(f"^shadow: {step}, survives {what}$", said, re.MULTILINE) and count == servers:
            return
        assert time.monotonic() < until_s, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "way", "states"),
    [
        (1, "bps scale", "auto"),
        (2, "bps scale", "auto"),
        (1, "death", "auto"),
        (2, "death", "auto"),
        (2, "death", "machine"),
    ],
)
def test_a_shadow_that_loses_its_protection_says_so(
    stack: contextlib.ExitStack, count: int, way: str, states: str
) -> None:
    """``count``: of GPU machines. Of two CPU machines one goes, which changes nothing; then the other one; then a new
    one comes."""
    cluster = ShadowedCluster(stack, count, 2, BYTEPS_HOSTED_STATES=states)
    _, *machines = cluster.start("adamw", "100000", "0.05")
    survives(cluster, "the loss of all GPU machines", servers=2)

    def go(index: int) -> None:
        if way == "death":
            cluster.servers[index].close()  # SIGKILL of all its processes
        else:
            cluster.bps("scale", str(index))

    go(1)
    survives(cluster, "the loss of all GPU machines", servers=1)
    go(0)
    changed = "the servers of the job have changed: once states are copied there, the copies that shadow=True asks for "
    worse = "survive nothing (they survived the loss of all GPU machines)"
    alone = "no server of another machine is left: until there is one again, nothing keeps copies of this machine's "
    warnings = [alone if count == 1 else changed + worse, changed + "survive the loss of all GPU machines (they surv"]
    for machine in machines:
        machine.until(warnings[0])
    survives(cluster, "nothing", step="no step held: no server of another machine is left" if count == 1 else HELD)
    cluster.add_server()
    for machine in machines:
        machine.until(warnings[1])
    survives(cluster, "the loss of all GPU machines", servers=1)
    for machine in machines:
        machine.close()
        said = [line for line in machine.said if changed in line or alone in line]
        assert len(said) == 2, said
        assert all(wanted in line for wanted, line in zip(warnings, said, strict=True)), said
