"""Links of members, broken at random and at every place: what members hear is the same, in the same order."""

from __future__ import annotations

import random

import pytest
from support.control_plane import Plane
from support.scheduler_core import CPU, ballot, declare, server, spec, worker
from test_scheduler_member_links import SHAPE, complete, running

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import job as states


def scenario(plane: Plane, rng: random.Random, steps: int) -> None:
    """Two workers declare, disagree, meet; a server more comes, and goes; at the end all leave."""
    for member, place in zip(plane.members[:2], (0, 2), strict=True):
        ranks = [place, place + 1]
        for step in range(1, steps):
            member.say(arrive=pb.Arrive(sequence=step))
            what = spec((3 + (step % 3 == 0 and place),))
            member.say(**declare(ballot(ranks, what, name=f"t{step}")))
            if rng.random() < 0.3:
                member.say(stack_report=pb.StackReport(rank=place, text="here"))


def check(plane: Plane, steps: int) -> None:
    one, two, third = plane.members[:3]
    for member in (one, two):
        bodies = member.bodies()
        assert bodies[:2] == ["welcome", "membership"]
        assert [m.release.sequence for m in member.heard if m.HasField("release")] == list(range(1, steps))
        verdicts = {v.name: bool(v.error) for m in member.heard for v in m.verdicts.verdicts}
        assert verdicts == {f"t{step}": step % 3 == 0 for step in range(1, steps)}
        epochs = [m.membership.epoch for m in member.heard if m.HasField("membership")]
        assert epochs == sorted(set(epochs))
        assert not any(m.HasField("failure") or m.HasField("refused") for m in member.heard)
    numbered = [[m.SerializeToString() for m in member.heard if m.number] for member in (one, two)]
    assert [pb.SchedulerMessage.FromString(m).WhichOneof("body") for m in numbered[0]] == [
        pb.SchedulerMessage.FromString(m).WhichOneof("body") for m in numbered[1]
    ]
    assert third.bodies()[:2] == ["welcome", "membership"]


@pytest.mark.parametrize("seed", range(60))
def test_connections_and_schedulers_break_at_any_moment(seed: int) -> None:
    rng = random.Random(seed)
    plane, one, two, third = complete()
    steps = 12
    scenario(plane, rng, steps)
    for _ in range(600):
        plane.happen(rng)
    if plane.links is None:
        plane.start()
    plane.settle()
    check(plane, steps)
    assert running(plane).core.state == states.RUNNING
    for member in (one, two, third):
        member.say(leave=pb.Leave())
    plane.settle()
    assert (running(plane).core.state, running(plane).core.reason) == (states.ENDED, "all workers have left")


def test_every_prefix_of_a_journal_is_a_state_that_members_can_go_on_with() -> None:
    """A crash after each write: members send again what was not written."""
    plane, *_ = complete()
    steps = 5
    scenario(plane, random.Random(1), steps)
    plane.settle()
    check(plane, steps)
    whole = list(plane.disk)
    for length in range(len(whole) + 1):
        other = Plane(**SHAPE)
        others = [other.add(worker(0)), other.add(worker(1)), other.add(server(0, CPU))]
        for member in others:
            other.connect(member)
        _feed_until(other, length)
        other.crash()
        other.start()
        other.settle()
        scenario_left(other, steps)
        other.settle()
        check(other, steps)
        epochs = [m.membership.epoch for m in others[2].heard if m.HasField("membership")]
        assert epochs == [1]


def _feed_until(plane: Plane, records: int) -> None:
    """The same job, one message at a time, until so much is written."""
    said = False
    for _ in range(500):
        if len(plane.disk) >= records:
            return
        if not said and all(member.end.epoch for member in plane.members):
            scenario(plane, random.Random(1), 5)
            said = True
        for member in plane.members:
            if len(plane.disk) < records:
                plane.carry_up(member)
                plane.flush()
            while member.down and len(plane.disk) < records:
                plane.carry_down(member)


def scenario_left(plane: Plane, steps: int) -> None:
    """What members had not said yet, if they had said nothing."""
    if plane.members[0].end.unconfirmed == 0 and "release" not in plane.members[0].bodies():
        scenario(plane, random.Random(1), steps)
