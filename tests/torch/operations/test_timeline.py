"""The timeline as a file, what starts and ends it, and the speed of push_pull; in jobs of one rank."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import byteps_py.torch as bps
from byteps_py.config.settings import Settings
from byteps_py.errors import ConfigurationError
from byteps_py.session import ResultRate
from byteps_py.session.solo import SoloSession
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.context import Context


@pytest.fixture
def alone():
    with contexts.use(Context(lambda settings: SoloSession())):
        yield
        bps.shutdown()


def read(path):
    events = json.loads(path.read_text())
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return events, [(rows[event["tid"]], event["name"]) for event in events if event["ph"] == "X"]


def push(name: str, times: int = 1, op=bps.Average) -> None:
    for _ in range(times):
        bps.push_pull(torch.ones(1000), name=name, op=op)


def test_what_is_recorded(alone, tmp_path) -> None:
    bps.init(settings=Settings())
    push("before")
    bps.start_timeline(str(tmp_path / "new" / "t.json"), mark_cycles=True)
    push("a", 2)
    push("b", op=bps.Sum)
    bps.start_timeline(str(tmp_path / "new" / "t.json"))  # that one already
    with pytest.raises(ValueError, match=r"recorded already, to .*t.json; call stop_timeline"):
        bps.start_timeline(str(tmp_path / "other.json"))
    bps.stop_timeline()
    push("after")
    bps.stop_timeline()
    events, rounds = read(tmp_path / "new" / "t.json")
    assert rounds == [("a", "AVERAGE"), ("a", "AVERAGE"), ("b", "SUM")]
    assert [event["args"]["round"] for event in events if event["ph"] == "X"] == [1, 2, 1]
    assert {event["args"]["bytes"] for event in events if event["ph"] == "X"} == {4000}
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"ALLREDUCE"}
    assert sum(event["name"] == "CYCLE_START" for event in events) == 3
    assert sum(event["name"] == "NEGOTIATE_ALLREDUCE" for event in events) == 3
    assert events[0]["args"]["start_time_since_epoch_in_micros"] <= min(e["ts"] for e in events if "ts" in e)
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)
    assert events[0]["args"]["name"] == "rank 0"
    bps.start_timeline(str(tmp_path / "again.json"))
    assert not (tmp_path / "other.json").exists()


def test_a_file_that_cant_be_written(alone, tmp_path) -> None:
    with pytest.raises(bps.NotInitializedError):
        bps.start_timeline("x")
    (tmp_path / "file").write_text("")
    bps.init(settings=Settings())
    with pytest.raises(ValueError, match=r"the timeline can't be written to .*t.json: File exists"):
        bps.start_timeline(str(tmp_path / "file" / "t.json"))
    bps.shutdown()
    with pytest.raises(ValueError, match="the timeline can't be written"):
        bps.init(settings=Settings(timeline=str(tmp_path / "file" / "t.json")))
    assert not bps.is_initialized()


def test_variables(alone, tmp_path) -> None:
    environ = {
        "HOROVOD_TIMELINE": str(tmp_path / "h.json"),
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "BYTEPS_TRACE_DIR": str(tmp_path),
        "BYTEPS_TRACE_ON": "1",
        "BYTEPS_TRACE_START_STEP": "2",
        "BYTEPS_TRACE_END_STEP": "3",
    }
    settings = Settings.from_env(environ)
    for given in (settings, dataclasses.replace(settings, timeline="")):
        bps.init(settings=given)
        push("a", 5)
        bps.shutdown()  # completes it
    events, rounds = read(tmp_path / "h.json")
    assert len(rounds) == 5
    assert any(event["name"] == "CYCLE_START" for event in events)
    events, _ = read(tmp_path / "0" / "comm.json")
    assert [event["args"]["round"] for event in events if event["ph"] == "X"] == [2, 3]

    bps.init(settings=Settings(timeline="DYNAMIC"))
    push("a")
    bps.start_timeline(str(tmp_path / "d.json"))
    push("b")
    bps.shutdown()
    assert read(tmp_path / "d.json")[1] == [("b", "AVERAGE")]
    with pytest.raises(ConfigurationError, match="BYTEPS_TRACE_START_STEP=5 must not be above BYTEPS_TRACE_END_STEP=4"):
        Settings(trace_start_step=5, trace_end_step=4)


def test_much_is_written_while_it_is_recorded(alone, tmp_path) -> None:
    bps.init(settings=Settings())
    bps.start_timeline(str(tmp_path / "t.json"))
    push("a", 1500)
    written = (tmp_path / "t.json").read_text()
    assert written.count('"ph": "X"') >= 1000
    assert json.loads(written + "]")  # what a viewer sees of a job that crashed
    bps.stop_timeline()
    assert len(read(tmp_path / "t.json")[1]) == 1500


def test_the_speed(alone) -> None:
    now = [100.0]
    with pytest.raises(bps.NotInitializedError):
        bps.get_pushpull_speed()
    bps.init(settings=Settings())
    contexts.current().session.observer = ResultRate(lambda: now[0])
    assert bps.get_pushpull_speed()[1] == 0.0
    push("a", 500)
    now[0] += 2
    milliseconds, speed = bps.get_pushpull_speed()
    assert speed == 1.0  # 500 times 4000 bytes in 2 s
    assert milliseconds > 1.6e12
    now[0] += 8
    assert bps.get_pushpull_speed()[1] == 0.2
    push("a", 500)
    now[0] += 2
    assert bps.get_pushpull_speed()[1] == 0.2  # of the last ten seconds that are over
    now[0] += 8
    assert bps.get_pushpull_speed()[1] == 0.2


def test_what_nothing_comes_behind_is_written_at_once(alone, tmp_path) -> None:
    bps.init(settings=Settings(timeline=str(tmp_path / "t.json")))
    bps.reducescatter(torch.ones(2), name="a")
    bps.broadcast(torch.ones(2), 0, name="b")
    bps.allgather(torch.ones(2), name="c")
    bps.alltoall(torch.ones(2), name="d")
    events = json.loads((tmp_path / "t.json").read_text() + "]")
    done = [event["cat"] for event in events if event["ph"] == "X"]
    assert list(dict.fromkeys(done)) == ["REDUCESCATTER", "BROADCAST", "ALLGATHER", "ALLTOALL"]
    assert [e["name"].removeprefix("NEGOTIATE_") for e in events if e["ph"] == "i"] == done
