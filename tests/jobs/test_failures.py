"""Jobs broken on purpose, with real processes: each ends in bounded time, with an error on every rank that says who or
what is at fault and what to do, and leaves nothing behind.

``Job.end`` checks the last: of processes, sockets, shared memory and temporary files. What bounds the time is that
test's deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket

import pytest
from support.breaking import ERROR_STATUS as ERROR, Job, alone, launch, service
from support.clusters import ROOT

from byteps_py.launch.process_plan import free_port

CLUSTER = "-np 1 --machines 2 --servers 1"  # every kind of process, and few of them


def addressed(port: int, **variables: str) -> dict[str, str]:
    """The variables of a cluster of two GPU machines and a CPU machine, and ``variables``."""
    return {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1",
        **variables,
    }


def machine(index: int, port: int, word: str = "short", **variables: str) -> contextlib.AbstractContextManager[Job]:
    """What a user starts on GPU machine ``index``."""
    own = {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(index), "BYTEPS_MACHINE_ID": f"m{index}"}
    return launch("", word, **addressed(port, **{**own, **variables}))


def wait_for_knocks(port: int, count: int) -> None:
    """Until so many processes have tried to reach the scheduler, which is not there yet; they go on trying."""
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(socket.create_server(("127.0.0.1", port)))
        door.settimeout(60)
        for _ in range(count):
            stack.enter_context(door.accept()[0])  # held open: the next is another process's


# ---- variables -------------------------------------------------------------------------------------------------------

OF_RANKS = [
    ({"BYTEPS_LOCAL_RANK": "2", "BYTEPS_LOCAL_SIZE": "2"}, "BYTEPS_LOCAL_RANK=2 must be below BYTEPS_LOCAL_SIZE=2"),
    ({"BYTEPS_PARTITION_BYTES": "5"}, "BYTEPS_PARTITION_BYTES='5' is not valid: it takes a whole number from 4096 to "),
    ({"DMLC_NUM_WORKER": "2"}, "2 GPU machines and 0 servers need a scheduler: set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_"),
    ({"DMLC_NUM_SERVER": "1"}, "1 GPU machine and 1 server need a scheduler: set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_"),
    ({"DMLC_PS_ROOT_URI": "127.0.0.1"}, "DMLC_PS_ROOT_URI is set but DMLC_PS_ROOT_PORT is not"),
    ({"BYTEPS_STALL_WARN_S": "9", "BYTEPS_STALL_LIMIT_S": "5"}, "the error would come before the warning"),
    ({"BYTEPS_SECRET_FILE": "/nowhere"}, "BYTEPS_SECRET_FILE=/nowhere can't be read: No such file or directory"),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "text"), OF_RANKS, ids=["-".join(environ) for environ, _ in OF_RANKS])
def test_a_rank_by_itself_says_which_variable_is_wrong(environ: dict[str, str], text: str) -> None:
    with alone("short", **environ) as job:
        assert job.end() == ERROR
        assert f": ConfigurationError: {text}" in job.text or text in job.text


OF_SERVICES = [
    ("server", {}, "a summation server needs the scheduler's address: set DMLC_PS_ROOT_URI and DMLC_PS_ROOT"),
    ("worker", {"DMLC_NUM_WORKER": "2"}, "needs a scheduler: set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"),
    ("scheduler", {}, "a scheduler needs the address to listen on: set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"),
    ("scheduler", {"DMLC_PS_ROOT_URI": "0.0.0.0", "DMLC_PS_ROOT_PORT": "9000"}, "set BYTEPS_SECRET or BYTEPS_SECRET_"),
    ("server", addressed(9, DMLC_NODE_HOST="192.0.2.77", BYTEPS_SECRET="x" * 16), "can't listen at 192.0.2.77: Canno"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "environ", "text"), OF_SERVICES)
def test_a_service_by_itself_says_what_it_lacks(module: str, environ: dict[str, str], text: str) -> None:
    with service(module, **environ) as job:
        assert job.end() == 2
        assert f"byteps_py {module}: " in job.text
        assert text in job.text
        assert "Traceback" not in job.text


def test_the_launcher_names_every_missing_variable() -> None:
    with launch("", "short", DMLC_ROLE="worker", DMLC_NUM_WORKER="2") as job:
        assert job.end() == 2
    for name in ("DMLC_NUM_SERVER", "DMLC_WORKER_ID", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"):
        assert re.search(rf"^bpslaunch:   {name} +\S", job.text, re.MULTILINE)


def test_machines_that_contradict_the_cluster_are_told_how_and_it_comes_together_without_them() -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        scheduler = enter(launch("", **addressed(port, DMLC_ROLE="scheduler", BYTEPS_LOG_LEVEL="INFO")))
        scheduler.until("listening on")
        good = [enter(machine(0, port))]
        scheduler.until("1 of 2 workers, 0 of 1 server")
        server = addressed(port, DMLC_ROLE="server", BYTEPS_SECRET="that of another job")
        wrong = [
            (machine(1, port, DMLC_NUM_WORKER="3"), "ConfigurationError: DMLC_NUM_WORKER is 3 in this process and 2 i"),
            (machine(1, port, BYTEPS_PARTITION_BYTES="8192"), "BYTEPS_PARTITION_BYTES is 8192 in this process and not"),
            (machine(0, port, BYTEPS_MACHINE_ID="mx"), "RendezvousError: DMLC_WORKER_ID=0 is taken by worker 0 (host "),
            (machine(1, port, BYTEPS_SECRET="that of another job"), "set the same BYTEPS_SECRET or BYTEPS_SECRET_FILE"),
            (launch("", **server), "set the same BYTEPS_SECRET or BYTEPS_SECRET_FILE"),
            (launch("", **addressed(port, DMLC_ROLE="scheduler")), f"DMLC_PS_ROOT_PORT={port}: Address already in use"),
        ]  # fmt: skip
        for first, second in zip(wrong[::2], wrong[1::2], strict=True):
            for job, text in [(enter(start), text) for start, text in (first, second)]:
                assert job.end() > 0
                assert text in job.text
        good += [enter(launch("", **addressed(port, DMLC_ROLE="server"))), enter(machine(1, port)), scheduler]
        assert [job.end() for job in good] == [0, 0, 0, 0]
    assert "0: reduced" in good[0].said
    assert re.search(r"WARNING: turned away worker 1 \(host .*, pid \d+\): DMLC_NUM_WORKER is 3 in", scheduler.text)


@pytest.mark.slow
def test_without_a_scheduler_nobody_waits_for_ever() -> None:
    port = free_port()
    with (
        launch("", **addressed(port, DMLC_ROLE="server", BYTEPS_START_TIMEOUT_S="6")) as server,
        machine(0, port, BYTEPS_START_TIMEOUT_S="6") as worker,
    ):
        assert (server.end(), worker.end()) == (1, ERROR)
    error = f"RendezvousError: no scheduler answers at 127.0.0.1:{port} after 6 s: start it (DMLC_ROLE=scheduler bpsla"
    assert f"byteps_py server: {error}" in server.text
    assert f"0.0: {error}" in worker.text
    assert "(Connection refused)" in worker.text


@pytest.mark.slow
def test_a_server_that_never_comes_is_named_on_every_rank() -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(machine(index, port, "train", BYTEPS_LOCAL_SIZE=size))
            for index, size in enumerate(("2", "1"))
        ]
        wait_for_knocks(port, len(jobs))  # so that only the scheduler's own start takes of its time
        limit = {"BYTEPS_START_TIMEOUT_S": "6"}
        jobs.insert(0, stack.enter_context(launch("", **addressed(port, DMLC_ROLE="scheduler", **limit))))
        assert [job.end() for job in jobs] == [1, ERROR, ERROR]
    error = (
        "RendezvousError: the cluster is not complete after 6 s (BYTEPS_START_TIMEOUT_S): 2 of 2 workers, 0 of 1 "
        "server: waiting for 1 server (DMLC_ROLE=server)"
    )
    assert {f"0.0: {error}", f"0.1: {error}"} <= set(jobs[1].said)
    assert f"1.0: {error}" in jobs[2].said


def test_ranks_of_one_machine_that_contradict_each_other() -> None:
    job_id = f"test-{free_port()}"

    def rank(local_rank: int, local_size: int) -> contextlib.AbstractContextManager[Job]:
        where = {"BYTEPS_LOCAL_RANK": str(local_rank), "BYTEPS_LOCAL_SIZE": str(local_size)}
        return alone("told", BYTEPS_JOB_ID=job_id, **where)

    with rank(0, 2) as first, rank(1, 3) as other:
        assert other.end() == ERROR
        with rank(1, 2) as twin:
            first.until("0: training")
            twin.until("1: training")
            with rank(1, 2) as same:
                assert same.end() == ERROR
            assert first.end() == 0  # which tells both to stop
            assert twin.end() == 0
    text = "UsageError: a rank came as local rank 1 of 3, but its communication service was started for 2 ranks: "
    assert text in other.text
    assert "UsageError: two processes of this machine both say that they are local rank 1" in same.text
    assert re.search(r"WARNING: turned away process \d+: a rank came as local rank 1 of 3", first.text)


# ---- disagreement ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "odd", "ranks"), [("-np 2", 0, 2), ("-np 2 --machines 2 --servers 1", 3, 4)])
def test_ranks_that_disagree_all_learn_who_gave_what(options: str, odd: int, ranks: int) -> None:
    with launch(options, "disagree", str(odd)) as job:
        assert job.end() == 0
    others = "rank 1" if ranks == 2 else "ranks 0-2"
    for what, common, different in [
        ("shape", "sum of int64[4]", "sum of int64[5]"),
        ("dtype", "sum of int64[4]", "sum of float64[4]"),
        ("op", "sum of int64[4]", "max of int64[4]"),
        ("average", "sum of int64[4]", "average of int64[4]"),
        ("root", "broadcast of int64[4] from rank 0", "broadcast of int64[4] from rank 1"),
    ]:
        gave = [f"{others} gave {common}", f"rank {odd} gave {different}"]
        text = ", ".join(sorted(gave, key=lambda words: (odd == 0) == words.startswith(others)))
        hint = "use the same shape, dtype and operation on every rank"
        for rank in range(ranks):
            assert f"{rank}: {what}: tensor 'w': {text}; {hint}" in job.said
    for rank in range(ranks):
        assert f"{rank}: again: MismatchError" in job.said
        assert f"{rank}: all sums are right" in job.said


# ---- the front end's own errors --------------------------------------------------------------------------------------


def test_the_front_end_says_what_is_wrong_and_goes_on() -> None:
    with launch("-np 2", program=ROOT / "tests" / "programs" / "front_end.py") as job:
        assert job.end() == 1
    not_open = "NotInitializedError: byteps_py has not been initialized; use byteps_py.init() first"
    for rank in ("0", "1"):
        said = dict(line.removeprefix(f"{rank}: ").split(": ", 1) for line in job.said if line.startswith(f"{rank}: "))
        for what in ("before init", "rank before init", "after shutdown", "old handle", "suspended"):
            assert said[what] == not_open
        for what in ("init twice", "name again", "pending", "resumed", "trained"):
            assert said[what] == "no error"
        assert said["shape"].startswith(
            "MismatchError: tensor 'y': rank 0 gave average of float32[3], rank 1 gave average of float32[4]; "
        )
        assert said["root"] == "UsageError: invalid root rank: 2 does not exist, ranks go from 0 to 1"
        assert re.fullmatch(
            rf"process \d+ was forked from rank {rank}, which alone may communicate; .*", said["forked"]
        )
    # An exception that nobody caught is told to the others, whose output it does not stand in.
    assert re.search(
        r"^0: other rank: PeerLostError: rank 1 \(process \d+ on .*\) was ended by an exception: ValueError: the "
        r"training data is bad",
        job.text,
        re.MULTILINE,
    )
    assert "bpslaunch: rank 1 exited with status 1" in job.text


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forked_child_is_told_that_it_is_no_rank(ranks: int) -> None:
    """Also where there is nobody to talk to: with more ranks it would not work."""
    with launch(f"-np {ranks}", program=ROOT / "tests" / "programs" / "forked.py") as job:
        assert job.end() == 0
    for rank in range(ranks):
        said = [line.removeprefix(f"{rank}: ") for line in job.said if line.startswith(f"{rank}: ")]
        *told, went_on = said
        assert [line.partition(": ")[0] for line in told] == ["sum", "broadcast", "gather", "join", "step", "adasum"]
        for line in told:
            assert re.search(rf": UsageError: process \d+ was forked from rank {rank}, which alone may ", line), line
        assert went_on == f"went on: {[float(ranks)] * 3}"


# ---- coming and going ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "environ", "ranks"),
    [
        ("-np 1", {"BYTEPS_FORCE_DISTRIBUTED": "1"}, 1),
        ("-np 2 --servers 1", {}, 2),  # a server has nothing to do
        ("-np 1 --machines 2 --servers 3", {}, 2),  # one too many
    ],
)
def test_unusual_layouts_work(options: str, environ: dict[str, str], ranks: int) -> None:
    with launch(options, "short", **environ) as job:
        assert job.end() == 0
    assert sorted(job.of_ranks) == [f"{rank}: reduced" for rank in range(ranks)]


# ---- deaths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "ranks"), [("-np 3", 3), (CLUSTER, 2)])
def test_a_rank_killed_in_a_reduction_is_named_by_every_other_one(options: str, ranks: int) -> None:
    with launch(options, "dies") as job:
        assert job.end() == 128 + signal.SIGKILL
    died = rf"rank {ranks - 1} \(process \d+ on .*\) died: its process ended without shutdown\(\)"
    missing = r"tensor 'big', round [12]: no result"  # perhaps a rank did not have the first round's result yet
    for rank in range(ranks - 1):
        assert re.search(rf"^{rank}: PeerLostError: {died}.*; {missing}$", job.text, re.MULTILINE), job.text
    assert re.search(rf"^bpslaunch: rank {ranks - 1}.* was killed by SIGKILL \(signal 9\)", job.text, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "word", "text"),
    [
        (
            "-np 2",
            "leaves",
            r"tensor 'gradient': rank 0 waits for other ranks, but rank 1 shut down: run the same number of steps on "
            r"every rank, or call join\(\)",
        ),
        ("-np 2", "skips", r"a barrier: rank 0 waits for other ranks, but rank 1 shut down"),
        pytest.param(
            CLUSTER, "leaves", r"tensor 'gradient': rank 0 waits for other ranks, but worker 1 \(rank 1, .*\) has ",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_rank_that_is_done_early_is_named(options: str, word: str, text: str) -> None:
    with launch(options, word, PS_HEARTBEAT_TIMEOUT="3") as job:  # one of another machine may be silent for so long
        assert job.end() == ERROR
    assert re.search(rf"^0: PeerLostError: {text}", job.text, re.MULTILINE)


GONE = r"the communication service of this machine is gone \(process PID\)"
FROZEN = r"the communication service of this machine \(process PID\) has not answered for 10 s: it is frozen or starved"
SILENT = r"nothing was heard of it for \S+ s \((PS_HEARTBEAT_TIMEOUT|BYTEPS_HEARTBEAT_TIMEOUT_MAX_S)"
WORKER = r"lost worker 1 \(rank 1, host .*, pid PID\)"
VICTIMS = [  # options, whom, how → what rank 0 and rank 1 say
    ("-np 2", "byteps_py.worker", {}, signal.SIGKILL, GONE, GONE),
    (CLUSTER, "byteps_py.worker", {"DMLC_WORKER_ID": "1"}, signal.SIGKILL, f"{WORKER}: its connection ended", GONE),
    pytest.param(
        CLUSTER, "byteps_py.worker", {"DMLC_WORKER_ID": "1"}, signal.SIGSTOP, f"{WORKER}: {SILENT}", FROZEN,
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "word", "environ", "signum", "text_0", "text_1"), VICTIMS)
def test_a_service_that_dies_or_freezes_is_named_on_every_rank(
    options: str, word: str, environ: dict[str, str], signum: signal.Signals, text_0: str, text_1: str
) -> None:
    with launch(f"{options} --grace-period 1", "train", PS_HEARTBEAT_TIMEOUT="1") as job:  # 10 s for a frozen one
        job.until("0: training", "1: training")
        pid = job.pid(word, **environ)
        os.kill(pid, signum)
        assert job.end() == ERROR
    for rank, text in enumerate((text_0, text_1)):
        assert re.search(f"^{rank}: PeerLostError: {text.replace('PID', str(pid))}", job.text, re.MULTILINE), job.text


@pytest.mark.slow
def test_without_its_scheduler_a_job_goes_on_and_ends_well() -> None:
    # Twice PS_HEARTBEAT_TIMEOUT after the last rank, the services end.
    environ = {"BYTEPS_JOURNAL_DIR": "none", "PS_HEARTBEAT_TIMEOUT": "3"}
    with launch(f"--grace-period 30 {CLUSTER}", "told", **environ) as job:
        job.until("0: training", "1: training")
        os.kill(job.pid("byteps_py.scheduler"), signal.SIGKILL)
        job.until("bpslaunch: the scheduler was killed", "worker 0 WARNING: lost the", "worker 1 WARNING: lost the")
        assert job.end() == 0  # which tells rank 0 to stop
        assert {"0: closed", "1: closed"} <= set(job.said)
        assert "did not end" not in job.text
        assert "agreed tensors are still reduced" in job.text


# ---- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("word", "moment"),
    [
        ("train", ("waiting for 2 workers",)),  # the cluster is not complete
        ("train", ("0: training", "1: training")),
        ("short", ("0: reduced", "1: reduced")),  # all is about to end
    ],
    ids=["rendezvous", "training", "shutdown"],
)
def test_a_signal_ends_everything(signum: signal.Signals, word: str, moment: tuple[str, ...]) -> None:
    with launch(CLUSTER, word, BYTEPS_LOG_LEVEL="INFO") as job:
        job.until(*moment)
        job.signal(signum)
        assert job.end() in ({128 + signum, 0} if word == "short" else {128 + signum})
    assert "could not be killed" not in job.text


# ---- waiting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "done"), [pytest.param("-np 2", "handed it over", marks=pytest.mark.slow), (CLUSTER, "declared it")]
)
def test_a_rank_that_never_comes_is_warned_about_then_an_error(options: str, done: str) -> None:
    with launch(options, "absent", "0", BYTEPS_STALL_WARN_S="1", BYTEPS_STALL_LIMIT_S="5") as job:
        job.until("0: reduced", "1: reduced")
        job.until("WARNING: tensor 'late' has waited", "1: StallError: ")
        assert job.end() == ERROR
    who = rf"for rank 0, which has not {done} \(worker 0 \(ranks? 0.*\)\): slow, stuck, or on another path"
    assert re.search(rf"WARNING: tensor 'late' has waited \S+ s {who}", job.text)
    limit = "rank 1 waits for other ranks longer than BYTEPS_STALL_LIMIT_S=5 allows"
    assert re.search(rf"^1: StallError: tensor 'late': {limit}: .*{who}", job.text, re.MULTILINE)


def test_a_rank_that_comes_late_is_warned_about_and_all_is_well() -> None:
    with launch("-np 2", "absent", "0", BYTEPS_STALL_WARN_S="0.5") as job:
        job.until("WARNING: tensor 'late' has waited")
        assert job.end() == 0
    assert {"0: late is reduced", "1: late is reduced"} <= set(job.said)
