"""Finds the step that can be restored from the states that servers hold. Pure; any thread.

A step can be restored if every rank's record of it is there, and of each tensor that these name, servers can deliver
all elements as they are after the tensor's last step. The states of different servers need not agree: each partition is
taken from any server that can deliver it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from byteps_py.errors import UsageError
from byteps_py.kernels.update_rules import StepKind
from byteps_py.shadow.record import read_common
from byteps_py.wire.data_link import HeldPartition, HeldRun, ShadowDescription, ShadowRecord


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """The states that one server holds. ``address``: of its data plane, ``tcp://host:port``. ``error``: why it gave no
    answer."""

    address: str
    description: ShadowDescription
    error: str = ""


@dataclass(frozen=True, slots=True)
class RestorablePartition:
    """Elements of a tensor's states that a server can deliver.

    Attributes:
        server: its address.
        run: see ShadowPartition, also key and index.
        key: of the tensor.
        index: of the partition.
        kind: of its steps: how many states there are, and of which dtype.
        elements: the elements of the tensor that are to be read from this partition.
        first: the partition's first element in the tensor.
        step: the step after which its states are wanted.
    """

    server: str
    run: int
    key: int
    index: int
    kind: StepKind
    elements: range
    first: int
    step: int


@dataclass(frozen=True, slots=True)
class RestorableRecord:
    """A rank's record, at the server with address ``server``, with its attachment. See ShadowRecord."""

    server: str
    run: int
    step: int
    rank: int
    size: int
    attached_bytes: int
    common: bytes

    @classmethod
    def of(cls, server: str, said: ShadowRecord) -> RestorableRecord:
        """The run as the server describes it."""
        return cls(server, said.run, said.step, said.rank, said.size, said.attached_bytes, said.common)


@dataclass(frozen=True, slots=True)
class Restorable:
    """A step for which everything is there.

    Attributes:
        run: the optimizer's run.
        step: the number of the step.
        records: by rank.
        commons: by the ranks that share an optimizer, () for all, what the first of them has said.
        common: of the optimizer of rank 0; of ``of_ranks``, of theirs.
        tensors: of each tensor of gradients, its partitions in order; together they have all its elements.
    """

    run: int
    step: int
    records: Mapping[int, RestorableRecord]
    commons: Mapping[tuple[int, ...], Mapping[str, Any]]
    tensors: Mapping[str, Sequence[RestorablePartition]]

    @property
    def common(self) -> Mapping[str, Any]:
        found = [common for ranks, common in self.commons.items() if not ranks or 0 in ranks]
        return found[0] if found else next(iter(self.commons.values()))

    def of_ranks(self, ranks: tuple[int, ...]) -> Restorable | None:
        """The part of one optimizer, which these ranks share (() for all); None if they share none."""
        return replace(self, commons={ranks: self.commons[ranks]}) if ranks in self.commons else None


@dataclass(frozen=True, slots=True)
class NotRestorable:
    """There are states, but no step for which all are there. ``reason``: a sentence."""

    reason: str


@dataclass(slots=True)
class _Held:
    """A partition that a server can deliver as of some steps."""

    server: str
    run: int
    held: HeldPartition

    def delivers(self, step: int) -> bool:
        return step == self.held.partition.step or step in self.held.steps


class _MergedRun:
    """The states that all servers hold of a run."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.age_s = float("inf")
        self.held: dict[str, list[_Held]] = {}  # by tensor
        self.records: dict[int, dict[int, RestorableRecord]] = {}  # by step and rank

    def add(self, server: str, run: HeldRun) -> None:
        self.age_s = min(self.age_s, run.age_s)
        for held in run.partitions:
            self.held.setdefault(held.partition.name, []).append(_Held(server, run.run, held))
        for record in run.records:
            self.records.setdefault(record.step, {})[record.rank] = RestorableRecord.of(server, record)

    @property
    def is_beyond_first_step(self) -> bool:
        """False if a run was ended in its first step: of that one, and of none before it, something is held."""
        held = [
            step
            for parts in self.held.values()
            for each in parts
            for step in (each.held.partition.step, *each.held.steps)
        ]
        return max([*held, *self.records], default=0) > 1


def latest_step(descriptions: Sequence[ServerDescription]) -> Restorable | NotRestorable | None:
    """The newest step that can be restored, of the run with the latest message. None if no server holds anything, or
    only parts of a run's first step: nothing is lost if it begins again.

    If nothing of the newest run can be restored, an older run counts: the newest one may have ended before all its
    states had arrived.
    """
    runs: dict[int, _MergedRun] = {}
    for each in descriptions:
        for run in each.description.runs:
            runs.setdefault(run.run, _MergedRun(run.run)).add(each.address, run)
    silent = [f"the server at {each.address} gave no answer: {each.error}" for each in descriptions if each.error]
    newest_first = sorted(runs.values(), key=lambda run: run.age_s)
    reasons = []
    for merged in newest_first:
        found = _restorable(merged)
        if isinstance(found, Restorable):
            return found
        if merged.is_beyond_first_step:
            reasons.append(found)
    if not reasons:
        return NotRestorable("; ".join(silent)) if silent else None
    return NotRestorable("; ".join([reasons[0], *silent]))


def _restorable(run: _MergedRun) -> Restorable | str:
    """The newest step of a run that can be restored; or why the newest one of which there are records can't be."""
    reason = ""
    for step in sorted(run.records, reverse=True):
        found = _at(run, step)
        if isinstance(found, Restorable):
            return found
        reason = reason or found
    held = sorted(name for name in run.held)
    return reason or f"there is no record of a step, but states of {_list_text(held)}"


def _at(run: _MergedRun, step: int) -> Restorable | str:
    records = run.records[step]
    size = max(record.size for record in records.values())
    missing = [rank for rank in range(size) if rank not in records]
    if missing:
        return f"step {step}: the records of ranks {_list_text(missing)} of {size} are missing"
    commons = _commons(records, size)
    if isinstance(commons, str):
        return f"step {step}: {commons}"
    tensors: dict[str, Sequence[RestorablePartition]] = {}
    for name, count, last in [part for common in commons.values() for part in common["parts"]]:
        cover = _cover(run.held.get(name, []), name, count, last)
        if isinstance(cover, str):
            return f"step {step}: {cover}"
        tensors[name] = cover
    return Restorable(run.number, step, records, commons, tensors)


def _commons(records: Mapping[int, RestorableRecord], size: int) -> dict[tuple[int, ...], dict[str, Any]] | str:
    """The common words of the ranks of each optimizer, for all of ``size`` ranks; or the fault in them."""
    found: dict[tuple[int, ...], dict[str, Any]] = {}
    for rank, record in sorted(records.items()):
        if rank and not record.common:
            continue
        try:
            common = read_common(record.common)
            ranks = tuple(map(int, common.get("ranks", ())))
            are_right = all(
                isinstance(name, str) and isinstance(count, int) and isinstance(last, int)
                for name, count, last in common["parts"]
            )
        except (ValueError, TypeError, LookupError, AttributeError):
            are_right = False
        if not are_right:
            return f"the record of rank {rank} is damaged"
        found[ranks] = common
    told = {rank for ranks in found for rank in ranks or range(size)}
    missing = [rank for rank in range(size) if rank not in told]
    return f"no record says what ranks {_list_text(missing)} share" if missing or not found else found


def _cover(held: list[_Held], name: str, count: int, last: int) -> list[RestorablePartition] | str:
    """Parts that have all elements of a tensor as of step ``last``; or which elements are missing."""
    found: list[RestorablePartition] = []
    able = [each for each in held if each.delivers(last)]
    at = 0
    while at < count:
        here = [each for each in able if each.held.partition.first <= at < _end(each)]
        best = max(here, key=_end, default=None)
        if best is None:
            next_ = min((each.held.partition.first for each in able if each.held.partition.first > at), default=count)
            others = [each for each in held if each.held.partition.first <= at < _end(each)]
            why = "no server has them"
            if others:
                steps = sorted({step for each in others for step in (each.held.partition.step, *each.held.steps)})
                why = f"servers have them as of step {_list_text(steps)}"
            return f"elements {at} to {next_} of {name!r} are missing as of step {last}: {why}"
        partition = best.held.partition
        try:
            kind = StepKind.from_code(partition.step_kind)
        except UsageError as error:
            return f"{name!r}: {error}"
        if found and found[0].kind != kind:
            return f"the parts of {name!r} are of different kinds of steps, {found[0].kind} and {kind}"
        end = min(_end(best), count)
        found.append(
            RestorablePartition(
                best.server, best.run, best.held.key, best.held.index, kind, range(at, end), partition.first, last
            )
        )
        at = end
    return found


def _end(held: _Held) -> int:
    return int(held.held.partition.first + held.held.partition.count)


def _list_text(items: Iterable[object]) -> str:
    """A list of at most four, in words.

    >>> _list_text([1, 2, 3, 4, 5, 6])
    '1, 2, 3, 4 and 2 more'
    """
    texts = [str(item) for item in items]
    more = f" and {len(texts) - 4} more" if len(texts) > 4 else ""
    return ", ".join(texts[:4]) + more
