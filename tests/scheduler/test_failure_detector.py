"""What silence proves, by how late a member's heartbeats have been. Times are exact."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest
from support.control_plane import Plane
from support.scheduler_core import CPU, GPU, server, worker

from byteps_py.config.settings import Settings
from byteps_py.errors import ConfigurationError
from byteps_py.failure_detector import GAIN, HALF_LIFE_S, FailureDetector
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.health import LivenessMonitor
from byteps_py.scheduler.roster import ClusterConfig, MemberRecord
from byteps_py.system.loop import EventLoop
from byteps_py.worker.io.server_links import silence_s

INTERVAL_S = 0.2


def detector(*intervals_s: float, ceiling_s: float = 10.0) -> FailureDetector:
    found = FailureDetector(INTERVAL_S, 1.0, ceiling_s)
    for each in intervals_s:
        found.on_heartbeat(each)
    return found


def test_on_a_quiet_machine_the_floor_decides() -> None:
    quiet = detector(*(0.2 + 0.01 * (i % 3) for i in range(100)))
    assert quiet.timeout_s() == 1.0
    assert quiet.suspicion(0.99) < 1 <= quiet.suspicion(1.0)
    assert quiet.why(1.04) == "nothing was heard of it for 1.0 s (PS_HEARTBEAT_TIMEOUT)"
    assert detector().timeout_s() == 1.0  # nothing is known of it yet
    assert detector(0.0, 0.0).lateness_s == 0.0  # early is not late


def test_where_heartbeats_have_been_late_silence_proves_less_for_a_while() -> None:
    busy = detector(0.2, 0.8, 0.2)
    late_s = 0.6 * 0.5 ** (0.2 / HALF_LIFE_S)
    assert busy.timeout_s() == pytest.approx(INTERVAL_S + GAIN * late_s)
    assert busy.why(3.3) == "nothing was heard of it for 3.3 s (PS_HEARTBEAT_TIMEOUT, longer as one of its heartbeats was 0.6 s late)"  # fmt: skip  # noqa: E501
    for _ in range(int(3 * HALF_LIFE_S / INTERVAL_S)):
        busy.on_heartbeat(INTERVAL_S)
    assert busy.timeout_s() == 1.0


def test_the_ceiling_bounds_how_long_a_death_is_overlooked() -> None:
    starved = detector(9.0)
    assert starved.timeout_s() == 10.0
    assert starved.why(10.2) == "nothing was heard of it for 10.2 s (BYTEPS_HEARTBEAT_TIMEOUT_MAX_S)"
    assert detector(9.0, ceiling_s=1.0).timeout_s() == 1.0


def test_over_a_slow_link_silence_proves_less() -> None:
    """A queue may hold a second of other traffic, and lose a heartbeat."""
    far = FailureDetector(INTERVAL_S, 1.0, 10.0, has_slow_link=True)
    assert far.timeout_s() == 5.0
    assert (
        far.why(5.1) == "nothing was heard of it for 5.1 s (PS_HEARTBEAT_TIMEOUT, 5 times as long as its link is slow)"
    )
    far.on_heartbeat(1.7)
    assert far.timeout_s() == pytest.approx(INTERVAL_S + GAIN * 1.5)
    assert dataclasses.replace(far, lateness_s=0.0, ceiling_s=3.0).timeout_s() == 3.0


@pytest.mark.parametrize(("mbit", "timeout_s"), [(0.0, 1.0), (2.0, 5.0), (100.0, 1.0)])
def test_the_scheduler_waits_longer_for_members_whose_links_are_slow(mbit: float, timeout_s: float) -> None:
    monitor = LivenessMonitor(ClusterConfig(num_workers=2))
    member = MemberRecord(1, 1, pb.Register(), 0.0)
    assert monitor.timeout_s(member) == 1.0  # its rate is not known yet
    member.link_mbit = mbit
    assert monitor.timeout_s(member) == timeout_s


def test_members_of_a_large_job_may_be_silent_for_longer() -> None:
    """They send heartbeats less often, and count as late only if these are."""
    monitor = LivenessMonitor(ClusterConfig(num_workers=10_000))
    member = MemberRecord(1, 1, pb.Register(num_workers=10_000, num_servers=5000), 0.0, is_ready=True)
    monitor.tick(0.0)
    assert monitor.timeout_s(member) == pytest.approx(1 + 1.5 * (10 - 0.2))
    assert not monitor.doubt(member, 29.0)  # three intervals of 10 s
    assert monitor.doubt(member, 31.0) == "silent for 31.0 s"
    assert not monitor.too_long(member, [member], 15.0)
    for now_s in range(1, 40):  # the scheduler has listened all the time
        monitor.tick(0.4 * now_s)
    assert monitor.lateness(member) == 1.0
    member.last_seen_s = 0.6
    monitor.on_heartbeat(member, 15.6)  # 5 s late
    assert monitor.timeout_s(member) == pytest.approx(2 * 15.7)  # the most
    assert monitor.lateness(member) == pytest.approx(2.0)


def test_others_that_are_late_show_that_the_load_has_just_begun() -> None:
    assert detector(0.2).timeout_s(others_lateness_s=0.1) == 1.0
    assert detector(0.2).timeout_s(others_lateness_s=0.6) == pytest.approx(INTERVAL_S + 1.2)


def test_waits_for_a_processor_with_a_heavy_tail_are_no_death() -> None:
    """Hours of a member on a machine at load 20: 1 of 100 heartbeats was 0.2 s late there, 1 of 1000 0.35 s; and twice
    that."""
    rng = random.Random(20)
    for scale_s in (0.06, 0.12, 0.06, 0.12):
        member = detector(0.6)
        for _ in range(int(3600 / INTERVAL_S)):
            wait_s = min(scale_s * rng.paretovariate(4), 3.0)
            silence_s_ = INTERVAL_S + wait_s
            assert member.suspicion(silence_s_) < 1, (silence_s_, member)
            member.on_heartbeat(silence_s_)


def test_the_settings_say_the_floor_and_the_ceiling() -> None:
    assert Settings().patience_s == 10.0
    environ = {"PS_HEARTBEAT_TIMEOUT": "2", "BYTEPS_HEARTBEAT_TIMEOUT_MAX_S": "5"}
    settings = Settings.from_env(environ)
    assert (settings.heartbeat_timeout_s, settings.patience_s) == (2.0, 5.0)
    with pytest.raises(ConfigurationError, match=r"BYTEPS_HEARTBEAT_TIMEOUT_MAX_S=1 must not be below PS_HEART"):
        Settings.from_env({**environ, "BYTEPS_HEARTBEAT_TIMEOUT_MAX_S": "1"})


# ---- in the scheduler -----------------------------------------------------------------------------------------


def plane(**config: object) -> Plane:
    """Two GPU machines with a server each, all at work for a while."""
    found = Plane(num_workers=2, num_servers=1, **config)
    for register in (worker(0), worker(1), server(0, CPU), server(0, GPU), server(1, GPU)):
        found.connect(found.add(register))
        found.settle()
    for member in found.members:
        member.say(ready=pb.Ready())
    found.settle()
    found.wait(2.0)
    return found


def beat(on: Plane, for_s: float, late: int = -1, every_s: float = 0.2) -> None:
    """All send heartbeats, member ``late`` every ``every_s``."""
    next_s = on.now + every_s
    for _ in range(round(for_s / 0.2)):
        on.tick(0.2)
        for index, member in enumerate(on.members):
            if index != late or on.now >= next_s - 1e-6:
                member.say(heartbeat=pb.Heartbeat(bare=True))
                next_s = next_s + every_s if index == late else next_s
        on.settle()


def silence_until_lost(on: Plane, index: int) -> float:
    """The member says nothing more; after how long the others go on without it."""
    since_s, before = on.now, len(on.members[0].heard)
    while not any(m.HasField("membership") for m in on.members[0].heard[before:]):
        beat(on, 0.2, late=index, every_s=1e9)
        assert on.now - since_s < 60.0
    return on.now - since_s


def test_a_frozen_server_of_a_quiet_machine_is_found_within_a_second_and_a_half() -> None:
    assert silence_until_lost(plane(), 2) <= 1.5


def test_a_server_whose_heartbeats_are_late_is_not_lost_and_found_later() -> None:
    on = plane()
    beat(on, 60.0, late=2, every_s=0.8)
    before = len(on.members[0].heard)
    beat(on, 2.4, late=2, every_s=2.4)  # more than the floor
    assert not any(m.HasField("membership") for m in on.members[0].heard[before:])
    assert 3.0 < silence_until_lost(on, 2) <= 10.4


def test_what_was_late_is_forgotten_with_a_scheduler_that_was_killed_and_replays_to_the_same() -> None:
    """Heartbeats are not in the journal: what they decide is written, and nothing else depends on them."""
    on = plane()
    beat(on, 10.0, late=2, every_s=0.8)
    silence_until_lost(on, 2)
    told = [[m.SerializeToString() for m in member.heard] for member in on.members]
    assert on.links is not None
    state = on.links.core.state, on.links.core.reason, on.links.core.job.roster.latest_epoch
    on.crash()
    on.start()  # raises JournalError if it does not lead to the same
    assert on.links is not None
    assert (on.links.core.state, on.links.core.reason, on.links.core.job.roster.latest_epoch) == state
    on.settle()
    assert [[m.SerializeToString() for m in member.heard] for member in on.members] == told
    on.members.pop(2)  # it is lost
    beat(on, 2.0)
    assert silence_until_lost(on, 2) <= 1.6


def test_a_snapshot_remembers_who_was_late() -> None:
    on = plane()
    beat(on, 10.0, late=2, every_s=0.8)
    on.compact()
    on.crash()
    on.start()
    on.settle()
    beat(on, 0.2)
    assert silence_until_lost(on, 2) > 2.0


def test_time_in_which_the_scheduler_heard_nobody_makes_nobody_late() -> None:
    on = plane()
    on.now += 5.0  # it was suspended; the first message comes before the first tick, as the loop has it
    beat(on, 2.0)
    assert silence_until_lost(on, 2) <= 1.6


# ---- in the communication service -----------------------------------------------------------------------------


def test_a_process_that_has_to_wait_for_a_processor_gives_servers_more_time() -> None:
    settings = Settings()
    loop = EventLoop()
    try:
        assert silence_s(settings, loop) == 1.0
        assert silence_s(settings, loop, has_slow_link=True) == 5.0
        ran: list[float] = []
        loop.call_later(-0.7, lambda: (ran.append(time.monotonic()), loop.stop())[0])  # type: ignore[func-returns-value]
        loop.run()
        assert ran
        assert 0.7 <= loop.lateness_s < 1.0
        assert GAIN * 0.69 <= silence_s(settings, loop) < 10.0
        assert silence_s(dataclasses.replace(settings, heartbeat_timeout_max_s=1.5), loop) == 1.5
    finally:
        loop.close()
