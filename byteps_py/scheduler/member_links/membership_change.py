"""A Membership by what differs from an earlier one, which its receiver has. Pure; any thread.

An epoch's table of all members goes to all of them, so its bytes grow with the square of their number, but mostly one
member has come or gone, and the shares of the others are new numbers. The order of members is kept as runs of the list
before:

    before   a b c d e        after   a b d e f        runs   (0, 2) (3, 2) + f

Shares and rates may change for all members at once, so they are sent as columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb

_MOST_MEMBERS = 1 << 20


def change_between(before: pb.Membership, after: pb.Membership) -> pb.MembershipChange:
    """``changed(before, …)`` of the result is ``after``.

    >>> before = pb.Membership(epoch=1, servers=[pb.Member(member_id=i, weight=2) for i in (1, 2, 3)])
    >>> after = pb.Membership(epoch=2, servers=[pb.Member(member_id=i, weight=3) for i in (1, 3)])
    >>> change = change_between(before, after)
    >>> [(run.first, run.count) for run in change.servers.runs], list(change.servers.weights)
    ([(0, 1), (2, 1)], [3, 3])
    >>> changed(before, change) == after
    True
    """
    facts = pb.Membership()
    for field, value in after.ListFields():
        if field.name not in ("workers", "servers"):
            setattr(facts, field.name, value)
    return pb.MembershipChange(
        since=before.epoch,
        facts=facts,
        workers=_changes(before.workers, after.workers),
        servers=_changes(before.servers, after.servers),
    )


def changed(before: pb.Membership, change: pb.MembershipChange) -> pb.Membership:
    """The Membership that ``change`` makes of ``before``. Raises ProtocolError if it is a change of another one, or
    names members that are not there."""
    if change.since != before.epoch:
        raise ProtocolError(f"the scheduler sent a change of epoch {change.since}; this process has {before.epoch}")
    after = pb.Membership()
    after.CopyFrom(change.facts)
    after.workers.extend(_changed(before.workers, change.workers))
    after.servers.extend(_changed(before.servers, change.servers))
    return after


def _changes(before: Sequence[pb.Member], after: Sequence[pb.Member]) -> pb.MemberChanges:
    places = {member.member_id: place for place, member in enumerate(before)}
    runs: list[pb.MemberRun] = []
    is_same_weight = is_same_rate = True
    for member in after:
        place = places.get(member.member_id, -1)
        if place < 0 or not _is_same(before[place], member):
            runs = runs or [pb.MemberRun()]
            runs[-1].added.append(member)
            continue
        is_same_weight &= before[place].weight == member.weight
        is_same_rate &= before[place].link_mbit == member.link_mbit
        if not runs or runs[-1].added or runs[-1].first + runs[-1].count != place:
            runs.append(pb.MemberRun(first=place))
        runs[-1].count += 1
    return pb.MemberChanges(
        runs=runs,
        weights=() if is_same_weight else [member.weight for member in after],
        link_mbit=() if is_same_rate else [member.link_mbit for member in after],
    )


def _is_same(before: pb.Member, after: pb.Member) -> bool:
    """But for its share and its rate."""
    if before == after:
        return True
    same = pb.Member()
    same.CopyFrom(before)
    same.weight, same.link_mbit = after.weight, after.link_mbit
    return same == after


def _changed(before: Sequence[pb.Member], changes: pb.MemberChanges) -> Iterable[pb.Member]:
    if sum(run.count + len(run.added) for run in changes.runs) > _MOST_MEMBERS:
        raise ProtocolError("the scheduler sent a change of more members than can be")
    after: list[pb.Member] = []
    for run in changes.runs:
        if run.first + run.count > len(before):
            raise ProtocolError(f"the scheduler sent a change of member {run.first + run.count} of {len(before)}")
        after += before[run.first : run.first + run.count]
        after += run.added
    for column in (changes.weights, changes.link_mbit):
        if len(column) not in (0, len(after)):
            raise ProtocolError(f"the scheduler sent {len(column)} values of {len(after)} members")
    if not changes.weights and not changes.link_mbit:
        return after
    found = []
    for place, each in enumerate(after):
        member = pb.Member()
        member.CopyFrom(each)
        if changes.weights:
            member.weight = changes.weights[place]
        if changes.link_mbit:
            member.link_mbit = changes.link_mbit[place]
        found.append(member)
    return found
