"""The rules by which a summation server keeps states of hosted optimizers in step. Pure: the test is the shell."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from byteps_py import codecs
from byteps_py.codecs import Coding, Draw
from byteps_py.kernels.update_rules import SCALARS, Method, StepKind, UpdateRule
from byteps_py.runtime import new_buffer
from byteps_py.server.shadow import LONGEST_HOLD_S, ShadowStore
from byteps_py.server.shadow_keeper import CodedTotal, ShadowKeeper
from byteps_py.server.shadow_state import (
    AllocateStates,
    ApplyStep,
    CopyState,
    DeliverStates,
    FillStates,
    HoldAsked,
    HoldOver,
    JobReplaced,
    NoMemory,
    OwnerMessage,
    PartFacts,
    PoolStarted,
    ReadAsked,
    RefuseRead,
    RefuseShadow,
    ReplacedRun,
    ShadowEvent,
    ShadowReply,
    ShadowTransitionError,
    StatesCopy,
    StepApplied,
    StepNotBegun,
)
from byteps_py.tensor_codec import Codec, CodecKind
from byteps_py.tensors import DType
from byteps_py.wire.data_link import (
    READER,
    Header,
    Kind,
    SegmentNumbers,
    ShadowPartition,
    ShadowRecord,
    ShadowStep,
    StatesRead,
)

KIND = StepKind(UpdateRule(Method.SGD, momentum=True), DType.FLOAT32, DType.FLOAT32)
COUNT = 8
NBYTES = COUNT * 4
RUN, KEY = 77, 5
INT8 = Codec(CodecKind.INT8)


@dataclass
class Shell:
    """Carries actions out. A state is the list of what it was seeded with and the sums that were applied to it.
    ``is_slow``: a step is applied when ``finish`` is called."""

    store: ShadowStore = field(default_factory=lambda: ShadowStore(4096))
    is_slow: bool = False
    has_memory: bool = True
    said: list[tuple[str, int]] = field(default_factory=list)  # HELD and LACKS, with the step
    texts: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    given: list[tuple[int, list[object]]] = field(default_factory=list)  # to readers: step and states
    turned_away: list[str] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)
    under_way: list[ApplyStep] = field(default_factory=list)
    spares: list[object] = field(default_factory=list)
    now: float = 0.0

    def handle(self, event: ShadowEvent) -> None:
        for action in self.store.handle(event, self.now):
            match action:
                case AllocateStates(it, spare):
                    if not self.has_memory:
                        self.handle(NoMemory(it, "no memory"))
                    else:
                        self.spares.append(spare)
                        it.memory = [[None] * it.facts.state_nbytes for _ in range(it.facts.kind.states)]
                case FillStates(it, state, offset, data):
                    it.memory[state][offset : offset + data.nbytes] = [data.value] * data.nbytes
                case ApplyStep():
                    assert action.copy.state is CopyState.STEPPING
                    assert action.copy not in [other.copy for other in self.under_way], "two at once"
                    self.under_way.append(action)
                    if not self.is_slow:
                        self.finish()
                case ShadowReply(_, header, text):
                    assert (header.kind is Kind.SHADOW_LACKS) == bool(text)
                    self.said.append((header.kind.name.removeprefix("SHADOW_"), header.round))
                    self.texts.append(text)
                case RefuseShadow(_, _, text):
                    self.refused.append(text)
                case DeliverStates(read, it):
                    assert it.state.is_whole
                    assert it not in [other.copy for other in self.under_way], "the thread pool writes there"
                    self.given.append((read.wanted.step, copy.deepcopy(it.memory)))
                case RefuseRead(_, text):
                    self.turned_away.append(text)
                case ReplacedRun(run, _):
                    self.replaced.append(run.number)

    def finish(self, error: BaseException | None = None) -> None:
        action = self.under_way.pop(0)
        if error is None:
            for state in action.copy.memory:
                state.append(action.step.total.value)  # type: ignore[attr-defined]
        self.handle(StepApplied(action.copy, error))

    def tell(self, header: Header, said: object = None) -> None:
        self.handle(OwnerMessage(header, "peer", said))

    def end_hold(self, now: float) -> None:
        self.now = now
        self.handle(HoldOver())

    # ---- an owner -------------------------------------------------------------------------------------------

    def header(self, kind: Kind, round_: int, generation: int = 1, index: int = 0, **facts: Any) -> Header:
        return Header(kind, 1, key=KEY, generation=generation, index=index, round=round_, dtype=DType.FLOAT32, **facts)

    def begin(self, step: int, run: int = RUN, **facts: Any) -> None:
        part = ShadowPartition(run=run, name="grads", first=0, count=COUNT, step_kind=KIND.code, step=step)
        self.tell(self.header(Kind.SHADOW_BEGIN, step, **facts), part)

    def fill(
        self, step: int, state: int, offset: int = 0, nbytes: int = NBYTES, value: object = "", **facts: Any
    ) -> None:
        header = self.header(Kind.SHADOW_STATE, step, segment=state, offset=offset, length=nbytes, **facts)
        data = SimpleNamespace(nbytes=nbytes, value=value or f"seed {step}")
        self.tell(header, data)

    def seed(self, step: int, **facts: Any) -> None:
        self.begin(step, **facts)
        facts.pop("run", None)
        for state in range(KIND.states):
            for offset in range(0, NBYTES, 16):
                self.fill(step, state, offset, 16, **facts)

    def sum(self, round_: int, nbytes: int = NBYTES, **facts: Any) -> None:
        total = SimpleNamespace(nbytes=nbytes, value=f"sum {round_}")
        self.tell(self.header(Kind.SHADOW_SUM, round_, **facts), total)

    def step(self, step: int, round_: int, durable: int = 0, before: int = -1, run: int = RUN, **facts: Any) -> None:
        whole = facts.pop("whole", False)
        segments = (SegmentNumbers(0, COUNT, (0.0,) * SCALARS),)
        before = step - 1 if before < 0 else before
        said = ShadowStep(run, step, before, divisor=1, durable=durable, whole=whole, segments=segments)
        self.tell(self.header(Kind.SHADOW_STEP, round_, **facts), said)

    def record(self, step: int, durable: int = 0, rank: int = 0, run: int = RUN, whole: bool = False) -> None:
        header = Header(Kind.SHADOW_RECORD, 1, key=run, index=rank, round=step)
        said = ShadowRecord(run=run, step=step, durable=durable, rank=rank, size=2, whole=whole)
        self.tell(header, said)

    def read(self, step: int, run: int = RUN, index: int = 0) -> None:
        wanted = StatesRead(run, KEY, index, step, state=0, start=0, stop=COUNT)
        self.handle(ReadAsked(Header(Kind.READ_STATES, READER), "reader", wanted))

    def heard(self) -> list[tuple[str, int]]:
        said, self.said = self.said, []
        return said

    # ---- a reader -------------------------------------------------------------------------------------------

    def parts(self, run: int = RUN) -> list[tuple[int, list[int]]]:
        """(step of the states, steps that can follow) of all copies."""
        runs = [each for each in self.store.describe(self.now).runs if each.run == run]
        return [(held.partition.step, list(held.steps)) for each in runs for held in each.partitions]

    def steps(self) -> list[tuple[int, int]]:
        """(step, rank) of records."""
        return sorted((r.step, r.rank) for run in self.store.describe(self.now).runs for r in run.records)


@pytest.fixture(name="shell")
def _shell() -> Shell:
    return Shell()


def seeded_with(states: list[object], *values: str) -> bool:
    """All bytes are of one seed, and these sums were applied."""
    seed, *sums = values
    return all(state == [seed] * NBYTES + sums for state in states)  # type: ignore[comparison-overlap]


# ---- seeds -----------------------------------------------------------------------------------------------------


def test_a_part_is_held_when_all_bytes_have_come(shell: Shell) -> None:
    shell.begin(3)
    for state in range(KIND.states):
        assert (shell.heard(), shell.parts()) == ([], [])
        shell.fill(3, state)
    assert (shell.heard(), shell.parts()) == ([("HELD", 3)], [(3, [])])


def test_states_that_are_sent_again_fill_the_same(shell: Shell) -> None:
    shell.begin(3)
    shell.fill(3, 0, 0, 16, "lost")
    shell.seed(3)
    assert (shell.heard(), shell.parts()) == ([("HELD", 3)], [(3, [])])
    shell.fill(3, 0, 0, 16, "late")
    shell.seed(3)
    assert shell.heard() == [("HELD", 3)]
    shell.read(3)
    assert seeded_with(shell.given[0][1], "seed 3")


def test_a_gap_in_the_states_is_lacked_once(shell: Shell) -> None:
    shell.begin(3)
    shell.fill(3, 1, 16, 16)
    shell.fill(3, 0)
    shell.step(4, round_=4)
    assert shell.heard() == [("LACKS", 3), ("LACKS", 4)]
    assert shell.texts[0] == "state 1 of elements 0 to 8 of 'grads': bytes 0 to 16 did not come"
    shell.seed(5)
    assert shell.heard() == [("HELD", 5)]


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"state": 2}, "which has 2 states of 32 bytes"),
        ({"state": 0, "offset": 16}, "32 bytes at 16 of state 0"),
        ({"state": 0, "offset": 1 << 62}, "which has 2 states"),
    ],
)
def test_bytes_outside_of_states_are_refused(shell: Shell, facts: dict[str, int], reason: str) -> None:
    shell.begin(3)
    shell.fill(3, **facts)
    assert reason in shell.refused[0]
    assert not any(
        isinstance(byte, str) for state in shell.store._runs[RUN].parts[KEY, 0].latest.memory for byte in state
    )


@pytest.mark.parametrize(
    "change",
    [{"count": 0}, {"count": 1 << 40}, {"step_kind": 1 << 20}, {"step": 4}],
)
def test_a_part_that_can_t_be_is_refused(shell: Shell, change: dict[str, int]) -> None:
    facts = {"run": RUN, "name": "g", "first": 0, "count": COUNT, "step_kind": KIND.code, "step": 3, **change}
    shell.tell(shell.header(Kind.SHADOW_BEGIN, 3), ShadowPartition(**facts))  # type: ignore[arg-type]
    assert len(shell.refused) == 1
    assert shell.parts() == []


def test_a_sum_with_a_codec_is_kept_as_its_code(shell: Shell) -> None:
    shell.seed(3, codec=INT8.code)
    assert shell.heard() == [("HELD", 3)]
    shell.sum(9)  # of the size that it had without a codec
    shell.step(4, round_=9)
    shell.seed(4, codec=INT8.code)
    shell.sum(10, nbytes=INT8.coded_nbytes(COUNT))
    shell.step(5, round_=10, durable=5)
    assert shell.heard() == [("LACKS", 4), ("HELD", 4), ("HELD", 5)]
    shell.read(5)
    assert seeded_with(shell.given[0][1], "seed 4", "sum 10")


@pytest.mark.parametrize(
    ("codec", "change"),
    [
        (Codec(CodecKind.THC), {}),  # its machines know the steps of its sums, and servers do not
        (Codec(CodecKind.INT8, error_feedback=True), {}),
        (INT8, {"first": 255}),
        (INT8, {"step_kind": StepKind(UpdateRule(Method.SGD), DType.FLOAT64, DType.FLOAT64).code}),
        (None, {}),
    ],
)
def test_a_codec_that_can_t_be_is_refused(shell: Shell, codec: Codec | None, change: dict[str, int]) -> None:
    facts = {"run": RUN, "name": "g", "first": 0, "count": COUNT, "step_kind": KIND.code, "step": 3, **change}
    header = shell.header(Kind.SHADOW_BEGIN, 3, codec=codec.code if codec is not None else 999)
    shell.tell(header, ShadowPartition(**facts))  # type: ignore[arg-type]
    assert len(shell.refused) == 1
    assert shell.parts() == []


def test_a_code_is_decoded_before_the_step() -> None:
    codec = replace(Codec.randomk(0.25, seed=3), drawn=4)
    given, coded = np.arange(5000, dtype=np.float32), np.zeros(codec.coded_nbytes(5000), np.uint8)
    draw = Draw(KEY, 4 + 7, 1)
    coding = Coding(codec, DType.FLOAT32, len(given), draw=draw)
    codecs.encode(coding, [int(given.ctypes.data)], int(coded.ctypes.data))
    due = np.zeros_like(given)
    codecs.decode(coding, int(coded.ctypes.data), [int(due.ctypes.data)], 1, 0)
    memory = np.zeros(given.nbytes, np.uint8)
    at = CodedTotal(codecs, coding, memory).decode(int(coded.ctypes.data))
    assert at == memory.ctypes.data
    assert memory.tobytes() == due.tobytes()
    facts = PartFacts(RUN, "g", KEY, 1, codec.block, len(given), KIND, codec)
    step = SimpleNamespace(round=7)
    keeper = SimpleNamespace(_runtime=SimpleNamespace(codecs=codecs, new_buffer=new_buffer))
    made = ShadowKeeper._code_of(keeper, facts, step)  # type: ignore[arg-type]
    assert made is not None
    assert made.coding == coding


def test_without_memory_a_part_is_lacked_and_the_rest_ignored(shell: Shell) -> None:
    shell.has_memory = False
    shell.seed(3)
    shell.sum(4)
    shell.step(4, 4)
    assert shell.heard() == [("LACKS", 3), ("LACKS", 4)]
    assert not shell.store.describe(0.0).runs
    shell.has_memory = True
    shell.seed(4)
    assert shell.heard() == [("HELD", 4)]


# ---- steps -----------------------------------------------------------------------------------------------------


def test_a_step_is_held_and_applied_once_it_is_durable(shell: Shell) -> None:
    shell.seed(10)
    for step in (11, 12, 13):
        shell.sum(step)
        shell.step(step, round_=step, durable=10)
    assert shell.heard() == [("HELD", step) for step in (10, 11, 12, 13)]
    assert shell.parts() == [(10, [11, 12, 13])]
    shell.record(13, durable=12)
    assert shell.parts() == [(12, [13])]
    shell.read(13)
    assert seeded_with(shell.given[0][1], "seed 10", "sum 11", "sum 12", "sum 13")
    assert shell.store.waiting_bytes == 0
    assert shell.store.record_bytes == shell.store.describe(0.0).runs[0].records[0].nbytes


def test_a_repeated_step_is_held_again_and_applied_once(shell: Shell) -> None:
    shell.seed(1)
    for durable in (1, 1, 2, 2):
        shell.sum(2)
        shell.step(2, 2, durable)
    assert shell.heard() == [("HELD", 1)] + 4 * [("HELD", 2)]
    shell.read(2)
    assert seeded_with(shell.given[0][1], "seed 1", "sum 2")


def test_steps_of_one_part_are_applied_one_after_another(shell: Shell) -> None:
    shell.is_slow = True
    shell.seed(1)
    for step in (2, 3):
        shell.sum(step)
        shell.step(step, step, durable=3)
    assert len(shell.under_way) == 1
    assert shell.parts() == [(2, [3])], "what is being applied will be there"
    shell.finish()
    assert len(shell.under_way) == 1
    shell.finish()
    assert shell.parts() == [(3, [])]


@pytest.mark.parametrize(
    ("before", "round_", "generation", "reason"),
    [
        (2, 2, 1, "step 5 of elements 0 to 8 of 'grads' follows step 2, but 1 is the last one here"),
        (1, 3, 1, "step 5 of elements 0 to 8 of 'grads': the sum of round 3 is not here"),
        (1, 2, 2, "step 5 of elements 0 to 8 of 'grads' is of generation 2 of the tensor, the states are of 1"),
    ],
)
def test_a_step_that_does_not_fit_is_lacked(
    shell: Shell, before: int, round_: int, generation: int, reason: str
) -> None:
    shell.seed(1)
    shell.sum(2)
    shell.step(5, round_, before=before, generation=generation)
    assert shell.heard()[1:] == [("LACKS", 5)]
    assert shell.texts[-1] == reason
    shell.step(5, 2, before=1)
    assert shell.heard() == [("HELD", 5)], "steps that a part does not make are left out"


def test_a_sum_of_another_size_or_type_is_not_kept(shell: Shell) -> None:
    shell.seed(1)
    shell.sum(2, nbytes=NBYTES // 2)
    shell.step(2, 2)
    assert shell.heard() == [("HELD", 1), ("LACKS", 2)]


def test_only_the_last_two_sums_are_kept(shell: Shell) -> None:
    shell.seed(1)
    for round_ in (1, 2, 3):
        shell.sum(round_)
    shell.step(2, 1)
    shell.step(2, 2)
    shell.step(3, 3)
    assert shell.heard() == [("HELD", 1), ("LACKS", 2), ("HELD", 2), ("HELD", 3)]


def test_sums_of_partitions_that_are_not_kept_are_not(shell: Shell) -> None:
    assert not shell.store.is_awaited(shell.header(Kind.PUSH, 1))
    shell.sum(1)
    shell.seed(1)
    assert shell.store.is_awaited(shell.header(Kind.PUSH, 1))
    shell.step(2, 1)
    assert shell.heard() == [("HELD", 1), ("LACKS", 2)]


def test_steps_that_come_before_the_states_are_complete_wait_for_them(shell: Shell) -> None:
    shell.begin(1)
    shell.sum(2)
    shell.step(2, 2, durable=1)
    shell.step(2, 2, durable=1)
    assert (shell.heard(), shell.parts()) == ([], [])
    for state in range(KIND.states):
        shell.fill(1, state)
    assert shell.heard() == [("HELD", 1), ("HELD", 2)]
    assert shell.parts() == [(1, [2])]


@pytest.mark.parametrize(
    "segment",
    [
        SegmentNumbers(start=0, stop=COUNT + 1, scalars=(0.0,) * SCALARS),
        SegmentNumbers(start=3, stop=2, scalars=(0.0,) * SCALARS),
        SegmentNumbers(start=0, stop=1, scalars=(0.0,)),
    ],
)
def test_segments_that_can_t_be_are_refused(shell: Shell, segment: SegmentNumbers) -> None:
    shell.seed(1)
    shell.sum(2)
    said = ShadowStep(run=RUN, step=2, before=1, divisor=1, segments=(segment,))
    shell.tell(shell.header(Kind.SHADOW_STEP, 2), said)
    assert len(shell.refused) == 1
    assert shell.parts() == [(1, [])]


def test_a_kernel_s_error_breaks_the_copy_until_the_owner_begins_anew(shell: Shell) -> None:
    shell.is_slow = True
    shell.seed(1)
    for step in (2, 3):
        shell.sum(step)
        shell.step(step, step, durable=3)
    shell.read(3)
    shell.finish(ValueError("no such kernel"))
    assert shell.turned_away == ["the step 2 of elements 0 to 8 of 'grads' could not be applied: no such kernel"]
    assert shell.parts() == []
    assert shell.store.waiting_bytes == 0
    shell.step(4, 4)
    shell.read(3)
    assert shell.heard()[-1] == ("LACKS", 4)
    assert len(shell.turned_away) == 2
    shell.seed(4)
    assert (shell.heard(), shell.parts()) == ([("HELD", 4)], [(4, [])])


def test_too_many_steps_that_wait_are_lacked() -> None:
    shell = Shell(ShadowStore(4096, most_waiting_bytes=2 * NBYTES))
    shell.seed(1)
    for step in (2, 3, 4):
        shell.sum(step)
        shell.step(step, step, durable=1)
    assert shell.heard() == [("HELD", 1), ("HELD", 2), ("HELD", 3), ("LACKS", 4)]
    assert shell.texts[-1].endswith("64 bytes of earlier steps wait here already")
    shell.step(3, 3, durable=3)
    shell.step(4, 4, durable=3)
    assert shell.heard() == [("HELD", 3), ("HELD", 4)]


# ---- again ------------------------------------------------------------------------------------------------------


def test_the_older_copy_is_read_until_the_run_is_durable_with_the_new_one(shell: Shell) -> None:
    shell.seed(1)
    for step in (2, 3):
        shell.sum(step)
        shell.step(step, step, durable=1)
    shell.begin(5)
    assert shell.parts() == [(1, [2, 3])]
    for state in range(KIND.states):
        shell.fill(5, state)
    shell.sum(6)
    shell.step(6, 6, durable=2)
    assert shell.parts() == [(2, [3]), (5, [6])]
    shell.read(2)
    shell.read(6)
    shell.read(4)
    assert [step for step, _ in shell.given] == [2, 6]
    assert len(shell.turned_away) == 1
    shell.record(6, durable=5)
    assert shell.parts() == [(6, [])]


def test_of_copies_that_follow_fast_the_one_with_the_durable_step_stays(shell: Shell) -> None:
    shell.seed(1)
    shell.record(1, durable=1)
    for step in (5, 6, 7):
        shell.seed(step)
    assert shell.parts() == [(1, []), (7, [])]
    shell.record(7, durable=7)
    assert shell.parts() == [(7, [])]


def test_a_copy_that_is_sent_again_has_to_catch_up_before_the_other_one_goes(shell: Shell) -> None:
    shell.seed(1)
    for step in (2, 3):
        shell.sum(step)
        shell.step(step, step, durable=3)
    shell.seed(2)
    assert shell.parts() == [(3, []), (2, [])]
    shell.sum(3)
    shell.step(3, 3, durable=3)
    assert shell.parts() == [(3, [])]


def test_states_that_are_there_are_not_begun_again(shell: Shell) -> None:
    """Their owner has not heard that they are, and sends them once more, or the network says it twice."""
    shell.seed(1)
    shell.sum(2)
    shell.step(2, 2)
    shell.begin(1)
    shell.sum(3)
    shell.step(3, 3)
    assert shell.heard() == [("HELD", 1), ("HELD", 2), ("HELD", 1), ("HELD", 3)]
    assert shell.parts() == [(1, [2, 3])]


def test_a_tensor_that_is_declared_again_is_another_generation(shell: Shell) -> None:
    shell.seed(1)
    shell.seed(1, index=1)
    shell.sum(9)
    shell.seed(4, generation=2)
    shell.sum(9)  # of the generation before
    shell.step(5, 9, durable=1, generation=2)
    shell.sum(1, generation=2)
    shell.step(5, 1, durable=1, generation=2)
    assert shell.heard() == [("HELD", 1), ("HELD", 1), ("HELD", 4), ("LACKS", 5), ("HELD", 5)]
    assert shell.parts() == [(1, []), (4, [5]), (1, [])]
    shell.record(5, durable=4)
    assert shell.parts() == [(4, [5])], "the old second partition is forgotten"


@pytest.mark.parametrize(("generation", "is_forgotten"), [(1, False), (2, True), (3, True)])
def test_the_end_of_a_part(shell: Shell, generation: int, is_forgotten: bool) -> None:
    shell.seed(1, generation=2)
    shell.sum(2, generation=2)
    shell.tell(shell.header(Kind.SHADOW_END, 0, generation=generation))
    assert (shell.parts() == []) == is_forgotten
    assert shell.store.is_awaited(shell.header(Kind.PUSH, 2)) != is_forgotten
    shell.tell(shell.header(Kind.SHADOW_END, 0, generation=3, index=9))


def test_a_part_may_end_while_it_is_stepped(shell: Shell) -> None:
    shell.is_slow = True
    shell.seed(1)
    shell.sum(2)
    shell.step(2, 2, durable=2)
    shell.read(2)
    shell.tell(shell.header(Kind.SHADOW_END, 0))
    shell.finish()
    assert shell.turned_away == ["elements 0 to 8 of 'grads' is not kept here any more"]


# ---- records and runs -----------------------------------------------------------------------------------------------


def test_records_stay_from_the_durable_step_on(shell: Shell) -> None:
    for step in (1, 2, 3):
        shell.record(step, rank=0)
    shell.record(1, rank=1)
    shell.record(1, rank=1)
    assert shell.heard() == [("HELD", step) for step in (1, 2, 3, 1, 1)]
    shell.record(4, durable=2)
    assert shell.steps() == [(1, 1), (2, 0), (3, 0), (4, 0)], "rank 1 has no newer one"


@pytest.mark.parametrize("change", [{"key": 1}, {"index": 1}, {"round": 1}, {"rank": 2, "index": 2}])
def test_a_record_that_contradicts_its_header_is_refused(shell: Shell, change: dict[str, int]) -> None:
    facts = {"key": RUN, "index": 0, "round": 5, "rank": 0, **change}
    rank = facts.pop("rank")
    header = Header(Kind.SHADOW_RECORD, 1, **facts)  # type: ignore[arg-type]
    shell.tell(header, ShadowRecord(run=RUN, step=5, rank=rank, size=2))
    assert len(shell.refused) == 1


def test_a_run_of_the_same_tensors_replaces_another_once_all_its_states_are_held(shell: Shell) -> None:
    shell.seed(8)
    shell.record(8, durable=8)
    shell.seed(8, run=2)
    shell.record(8, run=2)
    assert (shell.parts(), shell.parts(2)) == ([(8, [])], [(8, [])])
    shell.sum(1)
    shell.step(9, 1, durable=8, run=2)
    assert shell.replaced == []  # other servers may lack states of the new run
    shell.sum(2)
    shell.step(10, 2, durable=9, run=2, whole=True)
    assert shell.replaced == [RUN]
    assert (shell.parts(), shell.parts(2)) == ([], [(9, [10])])


def test_two_optimizers_of_a_job_stay_beside_each_other(shell: Shell) -> None:
    shell.seed(8)
    shell.record(8, run=2, durable=8, whole=True)
    shell.record(8, durable=8, whole=True)
    assert shell.replaced == []


def test_a_new_job_replaces_runs_when_all_its_states_are_held(shell: Shell) -> None:
    shell.seed(8)
    shell.begin(8, index=1)
    shell.record(8, durable=8)
    shell.handle(JobReplaced())
    assert shell.parts() == [(8, [])]
    shell.tell(shell.header(Kind.SHADOW_END, 0))
    shell.sum(9)
    assert not shell.store.is_awaited(shell.header(Kind.PUSH, 9))
    assert shell.store.durable() == (1, 8)
    shell.record(1, run=2)
    assert shell.replaced == []
    shell.record(1, run=2, durable=1)
    assert shell.replaced == []
    shell.record(1, run=2, durable=1, whole=True)
    assert shell.replaced == [RUN]
    assert shell.store.record_bytes == ShadowRecord(run=2, step=1, durable=1, rank=0, size=2, whole=True).nbytes


def test_what_was_not_applied_goes_on_with_another_engine(shell: Shell) -> None:
    shell.is_slow = True
    shell.seed(1)
    shell.sum(2)
    shell.step(2, 2, durable=2)
    action = shell.under_way.pop()
    shell.handle(StepNotBegun(action.copy, action.step))
    assert shell.parts() == [(1, [2])]
    shell.handle(JobReplaced())
    shell.handle(PoolStarted())
    shell.finish()
    shell.read(2)
    assert seeded_with(shell.given[0][1], "seed 1", "sum 2")


# ---- readers ---------------------------------------------------------------------------------------------------------


def test_steps_are_held_back_for_a_reader(shell: Shell) -> None:
    shell.seed(1)
    shell.handle(HoldAsked(1000.0))
    for step in (2, 3):
        shell.sum(step)
        shell.step(step, step, durable=step)
    shell.read(2)
    shell.end_hold(LONGEST_HOLD_S / 2)
    assert shell.parts() == [(2, [3])]
    shell.end_hold(LONGEST_HOLD_S)
    assert shell.parts() == [(3, [])]
    shell.read(2)
    assert shell.turned_away == ["elements 0 to 8 of 'grads' can't be read as of step 2: it is at step 3"]


def test_a_copy_that_was_described_stays_while_steps_are_held_back(shell: Shell) -> None:
    shell.seed(1)
    shell.seed(5)
    shell.handle(HoldAsked(10.0))
    shell.record(5, durable=5)
    assert shell.parts() == [(1, []), (5, [])]
    shell.end_hold(10.0)
    assert shell.parts() == [(5, [])]


def test_a_hold_ends_before_memory_does() -> None:
    shell = Shell(ShadowStore(4096, most_waiting_bytes=2 * NBYTES))
    shell.seed(1)
    shell.handle(HoldAsked(10.0))
    for step in (2, 3):
        shell.sum(step)
        shell.step(step, step, durable=step)
    assert shell.parts() == [(3, [])]


def test_a_reader_waits_for_the_step_that_is_being_applied(shell: Shell) -> None:
    shell.is_slow = True
    shell.seed(1)
    for step in (2, 3, 4):
        shell.sum(step)
        shell.step(step, step, durable=2)
    shell.read(2)
    shell.read(3)
    assert shell.given == []
    shell.finish()
    assert [step for step, _ in shell.given] == [2]
    shell.finish()
    assert [step for step, _ in shell.given] == [2, 3]
    assert shell.under_way == [], "step 4 is neither durable nor wanted"


def test_what_is_not_here_is_not_found(shell: Shell) -> None:
    shell.begin(1)
    shell.read(1)
    shell.read(1, run=9)
    assert shell.turned_away == [f"partition 0 of run {run:#x} is not kept here" for run in (RUN, 9)]


def test_a_state_has_its_followers() -> None:
    facts = ShadowStore(4096)._facts(Header(Kind.SHADOW_BEGIN, 1), ShadowPartition(RUN, 0, 1, KIND.code, 0, "g"))
    it = StatesCopy(facts, 1, 0, None, Header(Kind.SHADOW_BEGIN, 1))
    with pytest.raises(ShadowTransitionError, match="FILLING: STEPPING can't follow"):
        it.step_to(CopyState.STEPPING)


# ---- any order ----------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_is_lost_and_sent_again_no_states_mix(data: st.DataObject) -> None:
    """An owner whose connection breaks sends again what has no answer, and begins anew when the server lacks something.
    All that can be read is a seed and all sums since then."""
    shell = Shell(is_slow=True)
    sent: list[tuple[str, int]] = []  # since the last BEGIN
    step = durable = 0
    for _ in range(data.draw(st.integers(5, 40))):
        event = data.draw(st.sampled_from(["step", "step", "step", "break", "finish", "durable", "read", "hold"]))
        saying: list[tuple[str, int]] = []
        if event == "step":
            saying = [("begin", step)] if not sent else []
            step += 1
            saying.append(("step", step))
            sent += saying
        elif event == "break":  # as if the last answers were lost
            saying = sent[data.draw(st.integers(0, len(sent))) :]
        elif event == "finish" and shell.under_way:
            shell.finish()
        elif event == "durable":
            durable = max([durable, *(more[-1] if more else base for base, more in shell.parts())])
        elif event == "read":
            for base, more in shell.parts():
                shell.read(data.draw(st.sampled_from([base, *(number for number in more if number <= durable)])))
        elif event == "hold":
            shell.handle(HoldAsked(data.draw(st.floats(0, 9))))
        shell.now += 1.0
        shell.handle(HoldOver())
        for what, number in saying:
            if what == "begin":
                shell.seed(number)
            else:
                shell.sum(number)
                shell.step(number, number, durable)
        if any(what == "LACKS" for what, _ in shell.heard()):
            sent.clear()
        assert not durable or any(durable in (base, *more) for base, more in shell.parts())
    while shell.under_way:
        shell.finish()
    for base, more in shell.parts():
        shell.read(more[-1] if more else base)
    for base, states in shell.given:
        for state in states:
            seed = int(state[0].split()[1])  # type: ignore[index]
            assert state == [f"seed {seed}"] * NBYTES + [f"sum {each}" for each in range(seed + 1, base + 1)]
