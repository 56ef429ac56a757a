"""Every variable with garbage: taken, or refused by an error of ours that names it; never a traceback of a service."""

from __future__ import annotations

import contextlib
import doctest
import socket
import subprocess
import sys
import uuid

import pytest
from support import warm
from support.breaking import ERROR_STATUS, Job, alone, launch, service
from support.clusters import clean_environment

import byteps_py.scheduler.__main__ as scheduler
import byteps_py.server.__main__ as server
import byteps_py.worker.__main__ as worker
from byteps_py.config import variables
from byteps_py.config.settings import Settings, ignored_variables
from byteps_py.config.variables import IGNORED, VARIABLES, Variable
from byteps_py.errors import ConfigurationError
from byteps_py.session.service.starting import open_session
from byteps_py.system import channel
from byteps_py.system.machine import check_offered_host

LONG = "x" * 5000
GARBAGE = [
    "", "   ", LONG, "9" * 4000, "../../etc/x", "\x01\x1b[31m", "☃", "-1", "nan", "1e999", ";rm -rf /", "two\nlines",
    "\udcff", "/" * 5000, ".", "..", "a..b", "::", "[::1", "fe80::1%..", "a" * 64 + ".example", "0x1p99",
]  # fmt: skip
#: What each variable that is a text must refuse, of all garbage the likeliest to do harm.
REFUSED = {
    "DMLC_PS_ROOT_URI": [LONG, "../../etc/x", "\x01\x1b[31m", "☃", "-1", ";rm -rf /", "two\nlines", "a..b", "[::1"],
    "DMLC_NODE_HOST": [LONG, "../../etc/x", "\x01\x1b[31m", "☃", "-1", ";rm -rf /", "two\nlines", "fe80::1%.."],
    "DMLC_INTERFACE": [LONG, "../../etc/x", "\x01\x1b[31m", ";rm -rf /", "two\nlines", ".."],
    "BYTEPS_SOCKET_NAME": [LONG, "x" * 108, "☃" * 36, "\x01\x1b[31m", "two\nlines"],
    "BYTEPS_MACHINE_ID": [LONG, "\x01\x1b[31m", "two\nlines"],
    "BYTEPS_JOB_ID": [LONG, "\x01\x1b[31m", "two\nlines"],
    "BYTEPS_SECRET_FILE": [LONG, "/" * 5000, "../../no/such", "/dev/zero"],
    "BYTEPS_JOURNAL_DIR": [LONG, "a/" * 2500],
    "BYTEPS_REPORT": [LONG, "x" * 256],
    "HOROVOD_TIMELINE": [LONG],
    "BYTEPS_TRACE_DIR": [LONG],
    "BYTEPS_SCHEDULING_CREDIT": ["9" * 4000],
    "BYTEPS_TRACE_START_STEP": ["9" * 4000],
}  # fmt: skip
#: What must go on being taken: nobody's cluster stops at an upgrade.
TAKEN = {
    "DMLC_PS_ROOT_URI": [
        "localhost", "10.0.0.1", "127.1", "node_1.db-2.example.", "xn--n3h.net", "A1", "::1", "fe80::1%eth0", "[::1]",
        "::ffff:10.0.0.1", "fe80::1%eth0.100", "3com.com",
    ],
    "DMLC_NODE_HOST": ["10.0.0.2", "0.0.0.0", "fd00::2", "gpu-17"],
    "DMLC_INTERFACE": ["lo", "eth0:1", "enp0s31f6.4094", "br-0123456789ab", "wlan@☃"],
    "BYTEPS_SOCKET_NAME": ["byteps-0a1b-cs", "x" * 107, "with space", "☃" * 35],
    "BYTEPS_MACHINE_ID": ["m0", "0f8fad5b-4026531840", "rack 7/☃"],
    "BYTEPS_JOB_ID": ["127.0.0.1/29500/none/0", "../a b", "☃", "x" * 300],
    "BYTEPS_SECRET": [LONG, "\x01\x1b[31m" * 4, "two\nlines" * 2, "☃" * 6, ";rm -rf /" * 2],
    "BYTEPS_JOURNAL_DIR": ["none", "../x", "/var/lib/☃", "x" * 255, "two\nlines"],
    "BYTEPS_REPORT": ["report.json", "a/" * 2000],
    "HOROVOD_TIMELINE": ["DYNAMIC", "t.json"],
    "BYTEPS_SCHEDULING_CREDIT": ["0", str(1 << 40)],
}  # fmt: skip
#: Enough that each process would start, if the variable in question were right.
AROUND = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9", "DMLC_NUM_WORKER": "2"}


def refusal(name: str, text: str) -> str:
    """Why this variable can't have this value; empty if it can."""
    around = AROUND if name.startswith("DMLC_PS_ROOT") else {}
    if name.endswith("_STEP"):
        around = {"BYTEPS_TRACE_START_STEP": "0", "BYTEPS_TRACE_END_STEP": str(1 << 40)}
    try:
        Settings.from_env({**around, name: text})
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.field)
def test_garbage_is_taken_or_refused_by_the_variables_name(variable: Variable) -> None:
    for name in variable.names:
        for text in GARBAGE:
            why = refusal(name, text)
            assert not why or name in why
            assert len(why) < 1000
            assert "\x1b" not in why


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_do_harm_is_refused(name: str) -> None:
    for text in REFUSED[name]:
        why = refusal(name, text)
        assert name in why, ascii(text[:40])
        assert len(why) < 500
        assert why.isprintable()


@pytest.mark.parametrize("name", TAKEN)
def test_what_works_is_taken(name: str) -> None:
    for text in TAKEN[name]:
        assert not refusal(name, text)


def test_whatever_counts_as_a_host_can_be_asked_for() -> None:
    """``getaddrinfo`` raises OSError for what nobody knows; for what it can't encode it raises UnicodeError."""
    pieces = ["", ".", "a", "-", "_", "%", ":", "::", "1", "[", "]", "x" * 62, "fe80::1", "☃", " ", "\0", "/"]
    texts = [first + second + third for first in pieces for second in pieces for third in pieces]
    hosts = [text for text in texts if variables.is_host(text)]
    assert len(hosts) > 50
    for text in hosts:
        text.encode("idna")


def test_the_doctests_of_variables() -> None:
    result = doctest.testmod(variables)
    assert result.attempted
    assert not result.failed


def test_the_longest_local_socket_name_is_one() -> None:
    name = uuid.uuid4().hex.ljust(variables.MAX_SOCKET_NAME_BYTES, "x")
    listener = channel.Listener(name)
    try:
        channel.connect(name, 0).close()
    finally:
        listener.close()
    with pytest.raises(ConfigurationError, match=r"\(BYTEPS_SOCKET_NAME\) has 108 bytes; at most 107 fit"):
        channel.Listener(name + "x")
    with pytest.raises(ConfigurationError, match=r"\(BYTEPS_SOCKET_NAME\) has 108 bytes"):
        channel.connect(name + "x", 0)


@pytest.mark.parametrize("name", REFUSED)
def test_every_process_refuses_it_before_it_starts_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for variable, text in {"DMLC_NUM_SERVER": "0", "BYTEPS_TRACE_END_STEP": "99", **AROUND}.items():
        monkeypatch.setenv(variable, text)
    for text in REFUSED[name]:
        monkeypatch.setenv(name, text)
        for main in (lambda: server.main([]), lambda: worker.main([]), scheduler.main):
            assert main() == 2
            said = capsys.readouterr().err
            assert name in said
            assert "Traceback" not in said
        with pytest.raises(ConfigurationError, match=name):
            open_session()


def test_processes_name_the_variable_and_print_no_traceback() -> None:
    """Real ones, at once; the last three have values of the right form, which no machine can use."""
    nobody = {**AROUND, "BYTEPS_START_TIMEOUT_S": "5", "BYTEPS_SECRET": "x" * 16}
    by_hand = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1"}
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        jobs: list[tuple[Job, str, int]] = [
            (stack.enter_context(start), name, status)
            for start, name, status in (
                (service("scheduler", **{**AROUND, "DMLC_PS_ROOT_URI": LONG}), "DMLC_PS_ROOT_URI=", 2),
                (service("scheduler", **{**AROUND, "DMLC_PS_ROOT_URI": "../../etc/x"}), "DMLC_PS_ROOT_URI=", 2),
                (service("worker", BYTEPS_SOCKET_NAME=LONG), "BYTEPS_SOCKET_NAME=", 2),
                (alone("short", DMLC_INTERFACE="../../etc/x", **AROUND), "DMLC_INTERFACE=", ERROR_STATUS),
                (launch("", "short", **by_hand, BYTEPS_MACHINE_ID="two\nlines"), "BYTEPS_MACHINE_ID=", 2),
                (service("scheduler", **{**AROUND, "DMLC_PS_ROOT_PORT": port}), "DMLC_PS_ROOT_PORT=", 2),
                (service("worker", **nobody, DMLC_INTERFACE="nosuch0"), "DMLC_INTERFACE=nosuch0 is no interface", 2),
                (service("server", **nobody, DMLC_NODE_HOST="192.0.2.77"), "DMLC_NODE_HOST", 2),
            )
        ]
        for job, name, status in jobs:
            assert job.end() == status, job.text
            assert name in job.text
            assert "Traceback" not in job.text
            assert len(job.text) < 1000


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ({"DMLC_INTERFACE": "nosuch0"}, "DMLC_INTERFACE=nosuch0 is no interface of this machine"),
        ({"DMLC_NODE_HOST": "192.0.2.77"}, "DMLC_NODE_HOST=192.0.2.77 is not an address of this machine"),
        ({"DMLC_NODE_HOST": "nosuch.invalid"}, "DMLC_NODE_HOST=nosuch.invalid is not an address of this machine"),
    ],
    ids=["interface", "host", "name"],
)
def test_an_address_that_is_none_here_is_named_before_anything_starts(variable: dict[str, str], sentence: str) -> None:
    """By the launcher, and without one by every rank, not by services whose end is all that the ranks see."""
    around = {**AROUND, **variable, "DMLC_NUM_SERVER": "0", "BYTEPS_SECRET": "x" * 16}
    with contextlib.ExitStack() as stack:
        launcher = stack.enter_context(
            launch("", "short", DMLC_ROLE="worker", DMLC_WORKER_ID="0", BYTEPS_LOCAL_SIZE="2", **around)
        )
        ranks = [
            stack.enter_context(alone("short", BYTEPS_LOCAL_SIZE="2", BYTEPS_LOCAL_RANK=local_rank, **around))
            for local_rank in "01"
        ]
        assert launcher.end() == 2
        assert launcher.text.startswith(f"bpslaunch: {sentence}")
        for local_rank, rank in enumerate(ranks):
            assert rank.end() == ERROR_STATUS
            assert rank.text.startswith(f"0.{local_rank}: ConfigurationError: {sentence}")
        assert {len(job.said) for job in (launcher, *ranks)} == {1}  # nobody else had anything to say


def test_addresses_of_this_machine_are_taken() -> None:
    for host in ("127.0.0.1", "0.0.0.0", "localhost", "lo", socket.gethostname()):
        check_offered_host(Settings(num_workers=2, node_host=host, secret="x" * 16))
    check_offered_host(Settings(num_workers=2, interface="lo"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("BYTEPS_PARTITON_BYTES", "BYTEPS_PARTITION_BYTES"),
        ("DMLC_NUM_WORKERS", "DMLC_NUM_WORKER"),
        ("BYTEPS_NUM_WORKER", "DMLC_NUM_WORKER"),
        ("DMLC_LOCAL_SIZE", "BYTEPS_LOCAL_SIZE"),
        ("BYTEPS_LOGLEVEL", "BYTEPS_LOG_LEVEL"),
        ("BYTEPS_HEARTBEAT_TIMEOUT", "PS_HEARTBEAT_TIMEOUT"),
        ("BYTEPS_ZZZ", ""),
        ("DMLC_TASK", ""),
    ],
)
def test_a_variable_that_nobody_knows_is_named_with_its_neighbour(name: str, meant: str) -> None:
    (said,) = ignored_variables({name: "1", "BYTEPS_UNUSED": "", "BYTEPS_LAUNCH_TOKEN": "x", "PSQL": "x", "HOME": "/"})
    hint = f"; did you mean {meant}?" if meant else " (`bps env` lists them all)"
    assert said == f"{name} has no effect: no such variable is known{hint}"


def test_every_variable_that_is_read_is_known() -> None:
    assert ignored_variables({name: "1" for variable in VARIABLES for name in variable.names}) == []


def test_variables_of_byteps_that_mean_nothing_are_explained() -> None:
    assert ignored_variables({"BYTEPS_ENABLE_MIXED_MODE": "0"}) == []  # that is so
    assert ignored_variables(dict.fromkeys(IGNORED, "1")) == [
        f"{name} has no effect: {IGNORED[name]}" for name in IGNORED
    ]


@pytest.mark.parametrize("options", [["-np", "1"], ["-np", "2"]])
def test_a_job_says_once_which_variables_mean_nothing(options: list[str]) -> None:
    program = "import byteps_py as bps; bps.init(); bps.shutdown()"
    command = [sys.executable, "-m", "byteps_py.launch", *options, sys.executable, "-c", program]
    environment = clean_environment(BYTEPS_PARTITON_BYTES="8192", BYTEPS_NUMA_DEFAULT_QUOTA="1")
    done = warm.run(command, 100, env=environment)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "no effect" in line]
    assert len(said) == 2
    assert all(line.startswith("bpslaunch: ") for line in said)


def test_a_rank_without_a_launcher_says_it_itself() -> None:
    program = "import byteps_py as bps; bps.init(); bps.shutdown()"
    environment = clean_environment(BYTEPS_PARTITON_BYTES="8192")
    done = warm.run([sys.executable, "-c", program], 100, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("did you mean BYTEPS_PARTITION_BYTES?") == 1


def test_without_torch_the_error_says_what_to_install() -> None:
    for statement in ("byteps_py.init()", "import byteps_py.torch", "from byteps_py import DistributedOptimizer"):
        program = f"import sys; sys.modules['torch'] = None; import byteps_py; {statement}"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == (
            "ModuleNotFoundError: byteps_py needs PyTorch to train, and it is not installed here: "
            "pip install '.[torch]' in the source tree, as README.md says"
        )
        assert done.stderr.count("  File ") <= 5, done.stderr
    assert "importlib" not in done.stderr
