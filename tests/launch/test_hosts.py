"""bpslaunch -H, without any host: lists and files of hosts, what travels, and who is which machine."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest

from byteps_py import __version__
from byteps_py.errors import ConfigurationError, RendezvousError
from byteps_py.launch.command_line import parse
from byteps_py.launch.host_link import HostAnswer, HostReport, HostTask, LauncherLink
from byteps_py.launch.hosts import HostOptions, RemoteHost, parse_hostfile, parse_hosts, sizes_of
from byteps_py.launch.process_plan import ProcessKind, ProcessSpec
from byteps_py.launch.remote_hosts import RemoteJob, carried_variables, host_plan
from byteps_py.launch.supervision_policy import Phase, SupervisionPolicy
from byteps_py.wire.launch_protocol import Blame, FailureNotice

SECRET = "the secret of a test"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1:4,gpu2:4", [RemoteHost("gpu1", 4), RemoteHost("gpu2", 4)]),
        ("gpu1, me@gpu2.example:2", [RemoteHost("gpu1"), RemoteHost("me@gpu2.example", 2)]),
        ("gpu1,gpu1,gpu2", [RemoteHost("gpu1", 2), RemoteHost("gpu2")]),  # Open MPI
        ("gpu1:2,gpu1:2", [RemoteHost("gpu1", 4)]),
        ("[fe80::1]:4,[::2]", [RemoteHost("fe80::1", 4), RemoteHost("::2")]),
    ],
)
def test_lists(text: str, hosts: list[RemoteHost]) -> None:
    assert parse_hosts(text, "-H") == hosts


@pytest.mark.parametrize(
    "text", ["", "gpu1,", "gpu1:x", "gpu1:0", "gpu1:99999", "-oProxyCommand=x", "a b", "x@-v", "é"]
)
def test_lists_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="-H: "):
        parse_hosts(text, "-H")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1 slots=4\ngpu2 slots=2\n", [RemoteHost("gpu1", 4), RemoteHost("gpu2", 2)]),  # Horovod and DeepSpeed
        (
            "# ours\n\n gpu1 slots=4 max_slots=8 # one\ngpu2 slots=4 max-slots=4",
            [RemoteHost("gpu1", 4), RemoteHost("gpu2", 4)],
        ),
        ("gpu1\ngpu1\ngpu2\n", [RemoteHost("gpu1", 2), RemoteHost("gpu2")]),  # Open MPI
        ("gpu1:4\n", [RemoteHost("gpu1", 4)]),  # an older one of Horovod
    ],
)
def test_hostfiles(text: str, hosts: list[RemoteHost]) -> None:
    assert parse_hostfile(text, "hosts") == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu1 slots=4\ngpu2 slot=4", "hosts, line 2: 'slot=4' is not understood"),
        ("gpu1 slots=-4", "hosts, line 1: 'slots=-4' is not understood"),
        ("gpu1:2 slots=4", "gpu1 has two numbers of slots, 2 and 4"),
        ("gpu1 slots=4 max_slots=2", "slots=4 is more than max_slots=2"),
        ("# nothing", "hosts names no host"),
    ],
)
def test_hostfiles_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        parse_hostfile(text, "hosts")


@pytest.mark.parametrize(
    ("slots", "total", "gpus", "sizes"),
    [
        ([4, 2], 0, [0, 0], [4, 2]),
        ([None, None], 0, [8, 0], [8, 1]),
        ([4, 2], 6, [0, 0], [4, 2]),
        ([None, None], 6, [8, 8], [3, 3]),
    ],
)
def test_sizes(slots: list[int | None], total: int, gpus: list[int], sizes: list[int]) -> None:
    assert (
        sizes_of(HostOptions(tuple(RemoteHost(f"h{i}", slot) for i, slot in enumerate(slots)), total=total), gpus)
        == sizes
    )


def test_a_number_of_ranks_that_the_hosts_do_not_have_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"-np 4 is not what the hosts have: a:4, b:4 make 8 ranks"):
        sizes_of(HostOptions((RemoteHost("a", 4), RemoteHost("b", 4)), total=4), [0, 0])
    with pytest.raises(ConfigurationError, match=r"-np 5 ranks can't be divided among 2 hosts"):
        sizes_of(HostOptions((RemoteHost("a"), RemoteHost("b")), total=5), [0, 0])


class TestOptions:
    def test_hosts_of_all_kinds(self, tmp_path: os.PathLike[str]) -> None:
        path = os.path.join(tmp_path, "hosts")
        with open(path, "w") as file:
            file.write("gpu1 slots=2\n")
        others = ["--server-hosts", "cpu1", "--spare-hosts", "gpu9", "--max-restarts=3", "-p", "2222", "-x", "A=1"]
        for option in (["-H", path], ["--hostfile", path], ["-hostfile", path], ["-H", "gpu1:2"]):
            given = parse([*option, *others, "--ssh-options", "-l 'an other'", "cmd", "-x"], {})
            assert given.hosts is not None
            assert given.hosts.workers == (RemoteHost("gpu1", 2),)
            assert (given.hosts.servers, given.hosts.spares) == ((RemoteHost("cpu1"),), (RemoteHost("gpu9"),))
            assert given.hosts.ssh == ("-p2222", "-l", "an other")
            assert given.hosts.exports == ("A=1",)
            assert given.command == ("cmd", "-x")
            assert "--max-restarts=3" in given.host_arguments

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["-H", "a:2", "--machines", "2", "cmd"], "--machines, --servers and --spare do not go with them"),
            (["-H", "a:2", "--spare-hosts", "b", "cmd"], "--spare-hosts goes with --max-restarts"),
            (["-H", "a:2", "--hostfile", "x", "cmd"], "-H and --hostfile both name hosts"),
            (["-H", "a:2", "--server-hosts", "a", "cmd"], "a is named twice"),
            (["-H", "a:2", "--server-hosts", "b:2", "cmd"], "b has slots"),
            (["-H", "a:2", "--ssh-options", "'", "cmd"], "--ssh-options is not understood"),
            (["--hostfile", "/no/such", "cmd"], "the hostfile /no/such can't be read"),
            (["-np", "2", "--server-hosts", "b", "cmd"], "--server-hosts goes with -H or --hostfile"),
            (["-H", "a:2"], "which program?"),
        ],
    )
    def test_contradictions(self, arguments: list[str], words: str) -> None:
        with pytest.raises(ConfigurationError, match=re.escape(words)):
            parse(arguments, {})


def test_what_is_carried() -> None:
    environ = {
        "PATH": "/bin", "PYTHONPATH": "lib", "OMP_NUM_THREADS": "2", "DMLC_INTERFACE": "ib0", "BYTEPS_SHADOW": "1",
        "HOME": "/root", "BYTEPS_SECRET": SECRET, "BYTEPS_SECRET_FILE": "f", "DMLC_NODE_HOST": "h", "A": "a",
        "CUDA_VISIBLE_DEVICES": "0", "BYTEPS_LAUNCH_TOKEN": "t", "BYTEPS_LOCAL_SIZE": "3", "DMLC_NUM_WORKER": "9",
    }  # fmt: skip
    names = {"PATH", "PYTHONPATH", "OMP_NUM_THREADS", "DMLC_INTERFACE", "BYTEPS_SHADOW"}
    assert carried_variables(environ, []).keys() == names
    assert carried_variables(environ, ["A", "B=b=c"]) == {**{n: environ[n] for n in names}, "A": "a", "B": "b=c"}
    for export, words in (("C", "-x C: this variable is not set"), ("BYTEPS_SECRET", "goes to all hosts by itself")):
        with pytest.raises(ConfigurationError, match=words):
            carried_variables(environ, [export])


ANSWER = HostAnswer(__version__, "", "", (7001, 7002), 2, "")


def plan(options: HostOptions, **answers: HostAnswer) -> list[ProcessSpec]:
    job = RemoteJob(("python", "train.py"), ("--grace-period=5",), {"A": "1"}, SECRET, "/work")
    found = {host.name: answers.get(host.name, ANSWER) for host in options.all}
    return host_plan(replace(options, python="/py"), job, found, {})


def task_of(spec: ProcessSpec) -> HostTask:
    assert spec.task is not None
    return HostTask.unpack(spec.task.rstrip(b"\n"))


class TestPlan:
    HOSTS = HostOptions((RemoteHost("gpu1", 4), RemoteHost("me@gpu2", 2)), (RemoteHost("cpu1"),), ssh=("-v",))

    def test_every_host_has_its_part(self) -> None:
        answers = {"gpu1": replace(ANSWER, address="10.0.0.1")}
        specs = plan(self.HOSTS, **answers)
        assert [spec.name for spec in specs] == ["the scheduler on gpu1", "the server on cpu1", "gpu1", "gpu2"]
        assert [spec.kind is ProcessKind.MAIN for spec in specs] == [False, False, True, True]
        roles = [task_of(spec).variables["DMLC_ROLE"] for spec in specs]
        assert roles == ["scheduler", "server", "worker", "worker"]
        common = {
            "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "7001",
            "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7002", "BYTEPS_LAUNCH_RANK_COUNTS": "4,2", "A": "1",
        }  # fmt: skip
        for spec in specs:
            assert common.items() <= task_of(spec).variables.items()
        last = task_of(specs[-1])
        assert (last.variables["DMLC_WORKER_ID"], last.variables["BYTEPS_LOCAL_SIZE"]) == ("1", "2")
        assert last.arguments == ("--grace-period=5", "--", "python", "train.py")
        assert (last.label, last.folder, last.secret) == ("gpu2", "/work", SECRET)

    def test_no_argument_and_no_environment_has_the_secret(self) -> None:
        for spec in plan(self.HOSTS):
            public = [
                *spec.argv,
                *spec.env.values(),
                repr(spec),
                repr(task_of(spec)),
                *task_of(spec).variables.values(),
            ]
            assert not [text for text in public if SECRET in text]

    def test_ssh_gets_the_users_options_first(self) -> None:
        argv = plan(self.HOSTS)[-1].argv
        assert argv[:2] == ("ssh", "-v")
        assert argv[argv.index("--") + 1 :] == ("me@gpu2", "exec /py -P -m byteps_py.launch --on-host run")

    @pytest.mark.parametrize(
        ("first", "second", "address"),
        [
            (("10.0.0.1", "10.0.0.9"), ("10.0.0.2", "10.0.0.9"), "10.0.0.1"),
            (("", ""), ("10.0.0.2", "10.0.0.9"), "10.0.0.9"),  # the first is this machine, as the second one sees it
            (("127.0.1.1", "127.0.0.1"), ("10.0.0.2", "10.0.0.9"), "10.0.0.9"),
            (("", ""), ("", ""), "127.0.0.1"),
        ],
    )
    def test_the_schedulers_address_is_one_that_others_reach(
        self, first: tuple[str, str], second: tuple[str, str], address: str
    ) -> None:
        answers = {
            name: replace(ANSWER, address=at, client=client)
            for name, (at, client) in (("gpu1", first), ("me@gpu2", second))
        }
        assert plan(self.HOSTS, **answers)[0].env["DMLC_PS_ROOT_URI"] == address

    def test_one_rank_alone_needs_no_scheduler(self) -> None:
        (spec,) = plan(HostOptions((RemoteHost("gpu1", 1),)))
        assert task_of(spec).variables["DMLC_PS_ROOT_URI"] == ""

    def test_with_spare_hosts_a_server_host_runs_the_scheduler(self) -> None:
        specs = plan(replace(self.HOSTS, spares=(RemoteHost("gpu9"),)), cpu1=replace(ANSWER, address="10.0.0.3"))
        assert specs[0].name == "the scheduler on cpu1"
        assert specs[0].env["DMLC_PS_ROOT_URI"] == "10.0.0.3"
        assert task_of(specs[-1]).arguments[1:3] == ("--spare", "--")

    def test_a_setting_that_is_not_valid_is_found_before_anything_starts(self) -> None:
        job = RemoteJob(("cmd",), (), {"BYTEPS_LINK_MBIT": "much"}, SECRET, "/")
        with pytest.raises(ConfigurationError, match="BYTEPS_LINK_MBIT"):
            host_plan(HostOptions((RemoteHost("a", 2),)), job, {"a": ANSWER}, {})


class TestLink:
    def test_tasks_and_signals(self) -> None:
        task = HostTask("gpu1", "/work", ("a", "b c"), {"A": "é\n"}, SECRET)
        reader, writer = os.pipe()
        try:
            link = LauncherLink(reader, 2)
            os.write(writer, task.pack() + b"2\n1")
            assert link.task() == task
            os.write(writer, b"5\nx\n")
            assert link.signals() == [2, 15]
            os.close(writer)
            assert link.signals() == []
            assert link.is_over
        finally:
            os.close(reader)

    def test_a_task_that_is_none_is_refused(self) -> None:
        for line in (b"{}", b"[]", b"x", b'{"label": 1}'):
            with pytest.raises(RendezvousError, match="no task"):
                HostTask.unpack(line)

    def test_answers_are_found_among_what_a_shell_prints(self) -> None:
        assert HostAnswer.find(f"welcome\n{ANSWER.pack()}bye") == ANSWER
        assert HostAnswer.find("byteps-host {}\nbyteps-host x\n") is None

    @pytest.mark.parametrize("text", ["é" * 30_000, "\n" * 30_000, "\x01" * 30_000, "short"])
    def test_reports(self, text: str) -> None:
        data = HostReport("gpu1/3", FailureNotice(Blame.OWN, "ValueError", text)).pack()
        assert len(data) < 64 << 10
        assert data.count(b"\n") == 1
        found = HostReport.unpack(data.rstrip(b"\n"))
        assert found is not None
        assert found.notice is not None
        assert text.endswith(found.notice.text)
        assert HostReport.unpack(b"a line") is HostReport.unpack(b"\x1e{}") is None


def policy_of(*names: str, spares: tuple[str, ...] = ()) -> SupervisionPolicy:
    specs = [ProcessSpec(name, ProcessKind.MAIN, name, (), {}, task=b"", lost_status=255) for name in names]
    specs += [ProcessSpec(name, ProcessKind.SERVICE, name, (), {}, task=b"", is_spare=True) for name in spares]
    return SupervisionPolicy(specs, 5.0, 15.0)


def said(actions: list[object]) -> str:
    return " ".join(str(getattr(action, "text", "")) for action in actions)


class TestPolicy:
    def test_a_host_that_is_lost_ends_the_job(self) -> None:
        policy = policy_of("gpu1", "gpu2")
        text = said([*policy.exited("gpu2", 255, 0.0)])
        assert "the connection to gpu2 has failed: ssh ended with status 255" in text
        assert "the other host has 15 s" in text
        assert (policy.phase, policy.code) == (Phase.LOSING, 255)

    def test_the_code_is_that_of_the_rank_that_failed_first(self) -> None:
        policy = policy_of("gpu1", "gpu2")
        policy.foretold(3)
        policy.exited("gpu1", 1, 0.0)
        policy.exited("gpu2", 3, 0.0)
        assert policy.code == 3

    def test_a_spare_host_takes_the_place_of_one_that_is_lost(self) -> None:
        policy = policy_of("gpu1", "gpu2", spares=("gpu9",))
        assert "a spare host takes its place" in said([*policy.exited("gpu2", 255, 0.0)])
        policy.took_place("gpu9")
        assert policy.phase is Phase.RUNNING
        policy.exited("gpu1", 0, 1.0)
        assert not policy.finished
        policy.exited("gpu9", 0, 1.0)
        assert (policy.code, policy.finished) == (0, True)

    def test_a_place_that_nobody_took_is_a_failure(self) -> None:
        policy = policy_of("gpu1", spares=("gpu9",))
        policy.exited("gpu1", 255, 0.0)
        assert policy.code == 255

    def test_a_rank_that_fails_is_no_host_that_is_lost(self) -> None:
        policy = policy_of("gpu1", "gpu2", spares=("gpu9",))
        policy.exited("gpu2", 3, 0.0)
        assert (policy.phase, policy.code) == (Phase.LOSING, 3)

    def test_a_spare_host_that_is_lost_is_no_failure(self) -> None:
        policy = policy_of("gpu1", spares=("gpu9",))
        assert "the job goes on without this spare host" in said([*policy.exited("gpu9", 255, 0.0)])
        assert policy.exited("gpu1", 0, 0.0) == []
        assert policy.code == 0
