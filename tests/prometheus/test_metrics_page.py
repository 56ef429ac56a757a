"""A metrics page: what it has, who may ask, and what happens when its port or its process can't serve it."""

from __future__ import annotations

import http.client
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from byteps_py.config.settings import Settings
from byteps_py.errors import ConfigurationError
from byteps_py.launch.process_plan import free_port
from byteps_py.prometheus import metrics, page
from byteps_py.prometheus.metrics import LABELS, METRICS, MetricSample, Place
from byteps_py.proto import control_pb2 as pb
from byteps_py.system.loop import EventLoop

LOCAL = "127.0.0.1"


def member(number: int, role: int, machine: int, **facts: object) -> pb.MemberStatus:
    about = pb.Member(
        member_id=number, role=role, kind=2 if machine < 0 else 1, machine_index=machine,  # type: ignore[arg-type]
        address=f"tcp://10.0.0.{number}:7000", link_mbit=1000,
    )  # fmt: skip
    return pb.MemberStatus(member=about, **{"alive": True, "heartbeat_age_s": 0.1, **facts})  # type: ignore[arg-type]


def whole_status() -> pb.StatusReply:
    """Of a job in which there is something of everything."""
    ranks = [pb.RankProgress(rank=rank, steps=7 + rank, tokens=100, last_step_at_s=1.7e9) for rank in (0, 1)]
    return pb.StatusReply(
        state=pb.StatusReply.STATE_RUNNING, epoch=3, tensors=10_000, tensor_bytes=1 << 30, restarts=1,
        members=[
            member(1, 1, 0, progress=ranks[:1], statistics=pb.Statistics(bytes_sent=5, credit_bytes=9, queued=2)),
            member(2, 1, 1, progress=ranks[1:]),
            member(3, 2, 0, statistics=pb.Statistics(bytes_summed=11)),
            member(4, 2, -1),
            member(5, 2, -1, alive=False),
            member(6, 2, -1, alive=False, left=True),
        ],
        stalled=["tensor 'w' waits for rank 1"], awaited=[pb.AwaitedRank(rank=1, age_s=70)],
        shadow=pb.ShadowProtection(step=6, survives="one machine"), missing_workers=[3],
    )  # fmt: skip


@pytest.fixture(name="opened")
def opened_pages() -> Iterator[list[page.MetricsPage]]:
    pages: list[page.MetricsPage] = []
    yield pages
    for each in pages:
        each.close()


def page_with(found: list[MetricSample], opened: list[page.MetricsPage]) -> page.MetricsPage:
    opened.append(page.MetricsPage(LOCAL, 0, "the scheduler", lambda: found))
    return opened[-1]


def get(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{LOCAL}:{port}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def test_the_schedulers_page_has_every_metric_of_the_table_and_no_other(opened: list[page.MetricsPage]) -> None:
    text = get(page_with(list(metrics.of_status("j", whole_status())), opened).port)
    told = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    assert told == [(metric.name, metric.kind) for metric in METRICS]
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    assert helps == {metric.name: metric.meaning for metric in METRICS}
    extra = {metric.name: set(metric.extra) for metric in METRICS}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert set(sample.labels) == {*LABELS, *extra[sample.name]}


def test_figures_are_those_of_their_members(opened: list[page.MetricsPage]) -> None:
    text = get(page_with(list(metrics.of_status("j", whole_status())), opened).port)
    for line in (
        'byteps_steps_total{job="j",machine="gpu-1",rank="1",role="rank"} 8.0',
        'byteps_sent_bytes_total{job="j",machine="gpu-0",rank="",role="worker"} 5.0',
        'byteps_summed_bytes_total{job="j",machine="gpu-0",rank="",role="server"} 11.0',
        'byteps_link_bytes_per_second{job="j",machine="cpu-10.0.0.4:7000",rank="",role="server"} 1.25e+08',
        'byteps_awaited_seconds{awaited_rank="1",job="j",machine="",rank="",role="scheduler"} 70.0',
        'byteps_job_state{job="j",machine="",rank="",role="scheduler",state="running"} 1.0',
        'byteps_shadow_step{job="j",machine="",rank="",role="scheduler"} 6.0',
        'byteps_members_lost_total{job="j",machine="",rank="",role="scheduler"} 1.0',
    ):
        assert line in text.splitlines()


def test_a_lost_member_is_down_and_has_no_figures_and_one_that_has_left_has_no_line() -> None:
    found = list(metrics.of_status("j", whole_status()))
    of_lost = [each.name for each in found if each.place.machine == "cpu-10.0.0.5:7000"]
    assert of_lost == ["byteps_member_up"]
    assert not [each for each in found if each.place.machine == "cpu-10.0.0.6:7000"]


def test_a_lost_member_has_no_line_after_an_hour() -> None:
    members = [member(number, 2, -1, alive=False, heartbeat_age_s=age_s) for number, age_s in ((1, 3700), (2, 3500))]
    found = list(metrics.of_status("j", pb.StatusReply(members=members)))
    assert [each.place.machine for each in found if each.name == "byteps_member_up"] == ["cpu-10.0.0.2:7000"]
    assert [each.value for each in found if each.name == "byteps_members_lost_total"] == [2.0]


def test_a_member_in_the_place_of_a_lost_one_is_up() -> None:
    lost, new = member(1, 1, 0, alive=False), member(2, 1, 0)
    for members in ([lost, new], [new, lost]):
        found = metrics.of_status("j", pb.StatusReply(members=members))
        assert [each.value for each in found if each.name == "byteps_member_up"] == [1.0]


def test_machines_that_wait_for_the_next_group_have_lines_of_their_own() -> None:
    members = [member(number, 1, -1) for number in (1, 2)]
    for pid, each in enumerate(members, 41):
        each.member.kind, each.member.host, each.member.pid = pb.MACHINE_KIND_GPU, "gpu1", pid
    found = metrics.of_status("j", pb.StatusReply(members=members))
    up = [each.place.machine for each in found if each.name == "byteps_member_up"]
    assert up == ["gpu-outside-gpu1-41", "gpu-outside-gpu1-42"]


def test_a_page_has_some_lines_for_each_process_however_many_tensors_waits_and_losses_there_are() -> None:
    usual = len(list(metrics.of_status("j", whole_status())))
    many = whole_status()
    many.tensors = 1_000_000
    many.stalled[:] = [f"tensor {number}" for number in range(10_000)]
    many.awaited.extend(pb.AwaitedRank(rank=rank, age_s=rank) for rank in range(2, 10_000))
    many.members.extend(member(number, 2, -1, alive=False) for number in range(100, 1100))
    found = list(metrics.of_status("j", many))
    assert len(found) < usual + metrics.MOST_AWAITED + metrics.MOST_LOST
    awaited = [each.extra for each in found if each.name == "byteps_awaited_seconds"]
    assert awaited[0] == ("9999",)  # those that are awaited longest


def test_a_page_without_shadow_has_no_line_about_it() -> None:
    names = {each.name for each in metrics.of_status("j", pb.StatusReply(epoch=1))}
    assert "byteps_epoch" in names
    assert not any("shadow_step" in name for name in names)


def test_other_paths_are_not_found_and_what_is_no_request_ends_nothing(opened: list[page.MetricsPage]) -> None:
    port = page_with([], opened).port
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(port, "/etc/passwd")
    with socket.create_connection((LOCAL, port), 10) as stranger:
        stranger.sendall(b"\x00\xff" * 50_000 + b"\n\n")
    assert get(port) == ""


def test_strangers_that_say_nothing_are_cut_off_and_can_not_have_many_threads(opened: list[page.MetricsPage]) -> None:
    port = page_with([], opened).port
    before = threading.active_count()
    strangers = [socket.create_connection((LOCAL, port), 10) for _ in range(30)]
    try:
        strangers[-1].settimeout(10)
        assert strangers[-1].recv(1) == b""  # hung up at once
        assert threading.active_count() <= before + 9
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_page_that_can_not_be_made_is_an_answer_and_one_warning(
    opened: list[page.MetricsPage], caplog: pytest.LogCaptureFixture
) -> None:
    def collect() -> list[MetricSample]:
        raise TimeoutError("the process was too busy to answer within 3 s")

    opened.append(page.MetricsPage(LOCAL, 0, "the worker", collect))
    with caplog.at_level(logging.WARNING, "byteps_py"):
        for _ in range(2):
            with pytest.raises(urllib.error.HTTPError, match="503"):
                get(opened[0].port)
    assert [record.getMessage() for record in caplog.records] == [
        "metrics: the page of the worker can't be made: the process was too busy to answer within 3 s"
    ]


def test_a_loop_that_does_not_answer_is_waited_for_a_limited_time() -> None:
    loop = EventLoop()  # nobody runs it
    with pytest.raises(TimeoutError, match="too busy"):
        page.on_loop(loop.post, lambda: None, 0.05)
    loop.close()


def test_counters_are_read_in_the_thread_of_their_loop() -> None:
    loop = EventLoop()
    thread = threading.Thread(target=loop.run)
    thread.start()
    place = Place("j", "worker")

    def read() -> list[MetricSample]:
        return [MetricSample("byteps_epoch", place, float(threading.get_ident()))]

    found = page.on_loop(loop.post, read)
    loop.stop()
    thread.join(10)
    loop.close()
    assert found == [MetricSample("byteps_epoch", place, float(thread.ident or 0))]


def test_a_port_in_use_is_a_warning_that_names_the_process(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server((LOCAL, 0)) as taken, caplog.at_level(logging.WARNING, "byteps_py"):
        settings = Settings(metrics_port=taken.getsockname()[1])
        assert page.open_page(settings, "scheduler", list, LOCAL) is None
    (record,) = caplog.records
    said = record.getMessage()
    assert f"port {settings.metrics_port} of 127.0.0.1 can't be used: Address already in use" in said
    assert f"(process {os.getpid()} has it: " in said
    assert "Set another BYTEPS_METRICS_PORT" in said


def test_an_address_of_another_machine_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "byteps_py"):
        assert page.open_page(Settings(metrics_port=9400), "scheduler", list, "192.0.2.1") is None
    assert "Cannot assign requested address" in caplog.text


def test_each_process_of_a_machine_has_a_port_of_its_own() -> None:
    settings = [Settings(metrics_port=9400, local_size=2, local_rank=rank) for rank in (0, 1)]
    ports = [page.port_of(settings[0], role) for role in ("scheduler", "worker", "server", "rank")]
    assert [*ports, page.port_of(settings[1], "rank")] == [9400, 9401, 9402, 9403, 9404]
    assert page.port_of(Settings(), "rank") == 0


def test_a_port_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="BYTEPS_METRICS_PORT='70000' is not valid: it takes a whole"):
        Settings.from_env({"BYTEPS_METRICS_PORT": "70000"})
    with pytest.raises(ConfigurationError, match="use the ports up to 65540, and 65535 is the last one"):
        Settings(metrics_port=65530, local_size=8)


def test_a_forked_child_does_not_keep_the_port() -> None:
    """As a DataLoader's worker that outlives its rank, which is started again."""
    port = free_port()
    first = page.MetricsPage(LOCAL, port, "rank 0", list)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.read(reader, 1)
        os._exit(0)
    try:
        first.close()
        page.MetricsPage(LOCAL, port, "rank 0", list).close()
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_it_answers_a_scraper_that_wants_the_old_text_format(opened: list[page.MetricsPage]) -> None:
    port = page_with([MetricSample("byteps_epoch", Place("j", "scheduler"), 2.0)], opened).port
    connection = http.client.HTTPConnection(LOCAL, port, timeout=10)
    connection.request("GET", "/metrics", headers={"Accept": "text/plain;version=0.0.4"})
    answer = connection.getresponse()
    assert answer.status == 200
    assert (answer.getheader("Content-Type") or "").startswith("text/plain; version=")
    assert b'byteps_epoch{job="j",machine="",rank="",role="scheduler"} 2.0' in answer.read()
    connection.close()


OTHERS = [pytest.param(f"byteps_py.{name}", marks=pytest.mark.slow) for name in ("worker", "server")]


@pytest.mark.parametrize("module", ["byteps_py.scheduler", *OTHERS])
def test_without_prometheus_client_a_service_says_what_to_install(module: str) -> None:
    """It refuses to start, before anything else does."""
    code = (
        f"import sys, runpy; sys.modules['prometheus_client'] = None; runpy.run_module({module!r}, run_name='__main__')"
    )
    port = free_port()
    environ = {
        **os.environ, "BYTEPS_METRICS_PORT": "9400", "DMLC_PS_ROOT_URI": LOCAL, "DMLC_PS_ROOT_PORT": str(port),
        "BYTEPS_JOURNAL_DIR": "none",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "BYTEPS_METRICS_PORT needs prometheus-client, which is not installed here: pip install" in done.stderr
    assert "Traceback" not in done.stderr
