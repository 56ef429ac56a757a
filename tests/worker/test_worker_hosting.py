"""States that a service keeps for its ranks: what ranks may ask for, what they are told, when memory is given back."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from byteps_py import kernels
from byteps_py.errors import ProtocolError
from byteps_py.kernels.optimizer_steps import StepSegment, check_order
from byteps_py.kernels.update_rules import SCALARS, Hyperparameters, Method, StepKind, UpdateRule, step_scalars
from byteps_py.proto import control_pb2 as pb
from byteps_py.system.shm import Arena, Block
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.wire import rank_link as protocol
from byteps_py.wire.data_link import SegmentNumbers
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.events import Action, BytesReady, StepEnded, TensorAgreed
from byteps_py.worker.core.hosted_steps import AllSummed, HostedSteps, MakeStep
from byteps_py.worker.core.owners import OwnedPiece
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.tensor import RankSlot, Tensor
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.io.executor import Executor
from byteps_py.worker.io.rank_connection import RankConnection
from byteps_py.worker.io.slot_memory import SlotMemory
from byteps_py.worker.ranks.hosting import Hosting

KIND = StepKind(UpdateRule(Method.SGD, momentum=True), DType.FLOAT32, DType.FLOAT32)
COUNT = 5
GRADIENTS = TensorSpec("g", DType.FLOAT32, (COUNT,), ownership="g")
PARAMETERS = TensorSpec("p", DType.FLOAT32, (COUNT,), Op.BROADCAST, ownership="g")
#: Rank 0 owns the first two elements, rank 1 the others.
PIECES = [OwnedPiece(0, 8, -1, 0, 0), OwnedPiece(8, 12, -1, 1, 1)]
Done = Callable[[BaseException | None], None]


@dataclass
class Rank:
    local_rank: int
    arena: Arena
    said: list[Any] = field(default_factory=list)

    def allocate(self, nbytes: int) -> Block:
        return self.arena.allocate(nbytes)

    def send(self, message: object) -> None:
        self.said.append(protocol.decode(protocol.encode(message)))


def _numbers(start: int, stop: int) -> SegmentNumbers:
    return SegmentNumbers(start, stop, (0.0,) * SCALARS)


class Service:
    """A machine of two ranks, alone. Kernels run when they are told to."""

    def __init__(self) -> None:
        self.arena = Arena(1 << 16)
        self.ranks = {local_rank: Rank(local_rank, self.arena) for local_rank in (0, 1)}
        self.freed: list[Block] = []
        self.due: list[tuple[Callable[[], None], Done]] = []
        self.slots = {number: self._slot(number, spec) for number, spec in enumerate([GRADIENTS, PARAMETERS] * 2)}
        steps = HostedSteps(0, 2, (0, 0))
        self.pipeline = RoundPipeline(2, PushQueue(), hosted=steps)
        memory = SimpleNamespace(slots=self.slots, free_states=lambda rank, blocks: self.freed.extend(blocks))
        machine = pb.Member(machine_index=0, machine_id="m0", local_size=2)
        topology = Topology(1, 0, (machine,), (), 4096, 1)
        executor = SimpleNamespace(
            run_kernel=lambda work, done: self.due.append((work, done)),
            run=self.carry_out,
            handle=lambda event: self.carry_out(self.pipeline.handle(event, 0.0)),
            ranks=self.ranks,
            kernels=kernels,
            coded_parts=SimpleNamespace(change_of=lambda step, outputs: None),  # of parameters without a codec
        )
        self.hosting = Hosting(topology, cast(SlotMemory, memory), cast(Executor, executor), self.pipeline)

    def _slot(self, number: int, spec: TensorSpec) -> RankSlot:
        """Slots 0 and 1 are rank 0's, 2 and 3 rank 1's."""
        block = self.arena.allocate(4 * COUNT)
        return RankSlot(number, number // 2, spec, (block,), block)

    def agree(self) -> None:
        for spec in (GRADIENTS, PARAMETERS):
            slots = [slot for slot in self.slots.values() if slot.spec is spec]
            made = Tensor(spec.name, 1, spec, tuple(slots), machines=1)
            for slot in slots:
                slot.tensor = made
            assert self.pipeline.handle(TensorAgreed(made, PIECES), 0.0) == []
        self.hosting.agreed()

    def carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, MakeStep):
                self.due.append((self.hosting.bind(action), self._ended(action)))
            elif isinstance(action, AllSummed):
                self.hosting.summed(action.slot)

    def _ended(self, step: MakeStep) -> Done:
        def done(error: BaseException | None) -> None:
            self.hosting.stepped(step)
            self.carry_out(self.pipeline.handle(StepEnded(step), 0.0))

        return done

    def rank(self, local_rank: int = 0) -> RankConnection:
        return cast(RankConnection, self.ranks[local_rank])

    def run(self, error: BaseException | None = None) -> None:
        due, self.due = self.due, []
        for work, done in due:
            work()
            done(error)

    def host(self, local_rank: int = 0, **changed: Any) -> int:
        """Returns the id of the states."""
        first = 2 * local_rank
        asked = protocol.KeepStates(7, KIND.code, first, first + 1, 0, 0)
        self.hosting.host(self.rank(local_rank), dataclasses.replace(asked, **changed))
        if self.slots[0].tensor is None:
            assert not self.due
            self.agree()
        self.run()
        kept = self.ranks[local_rank].said.pop()
        assert isinstance(kept, protocol.StatesKept)
        assert (kept.request, len(kept.states), kept.error) == (7, 2, "")
        assert (kept.count, kept.owners) == ((2, 3)[local_rank], ((0, 2, 0), (2, 3, 1)))
        return kept.id

    def floats(self, number: int) -> memoryview:
        block = self.slots[number].input
        view = self.arena.segments[block.segment].view
        return view[block.offset : block.offset + 4 * COUNT].cast("f")

    def ready(self, spec: TensorSpec, values: dict[int, list[float]] | None = None) -> None:
        for number, slot in self.slots.items():
            if slot.spec is spec:
                if values is not None:
                    self.floats(number)[:] = array("f", values[number])
                self.carry_out(self.pipeline.handle(BytesReady(slot, slot.round + 1, spec.nbytes), 0.0))

    def step(self, part: int, round_: int, rank: int = 0, **changed: Any) -> None:
        scalars = step_scalars(KIND.rule, Hyperparameters(lr=0.5, momentum=0.5), max(1, round_))
        segments = (SegmentNumbers(0, (2, 3)[rank], scalars),)
        asked = protocol.BeginStep(part, round_, True, 0, 0, False, segments)
        self.hosting.step(self.rank(rank), dataclasses.replace(asked, **changed))


@pytest.fixture
def service() -> Any:
    service = Service()
    yield service
    service.arena.close()


def test_a_step_is_made_once_and_written_to_all_ranks(service: Service) -> None:
    parts = [service.host(0), service.host(1)]
    for round_ in (1, 2):
        service.ready(GRADIENTS, {0: [1, 2, 3, 4, 5], 2: [0, 1, 0, 1, 0]})
        for rank in (0, 1):
            service.step(parts[rank], round_, rank)
            service.step(parts[rank], round_, rank)  # again
        assert len(service.due) == 2
        service.ready(PARAMETERS)
        service.run()
    # The first moment is the gradient, the second one and a half of it.
    expected = [-0.5 * value - 0.75 * value for value in (1, 3, 3, 5, 5)]
    assert list(service.floats(1)) == list(service.floats(3)) == expected
    assert service.slots[0].ready_bytes == service.slots[1].ready_bytes == -1  # both rounds are over


def test_norms_are_of_the_sums_that_a_rank_owns(service: Service) -> None:
    part = service.host(1)
    service.hosting.norm(service.rank(1), protocol.MeasureNorm(5, part, ((0, 1), (2, 3))))
    assert not service.due  # the sums are not there
    service.ready(GRADIENTS, {0: [1, 2, 3, 4, 5], 2: [0, 1, 0, 1, 1]})
    service.run()
    assert service.ranks[1].said == [protocol.NormMeasured(5, 9 + 36)]


def test_an_error_of_a_kernel_is_told(service: Service) -> None:
    service.agree()
    service.hosting.host(service.rank(), protocol.KeepStates(7, KIND.code, 0, 1, 0, 0))
    service.run(MemoryError("none left"))
    kept = service.ranks[0].said.pop()
    assert (kept.error, kept.message) == ("CommunicationError", "none left")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"round": 3}, "local rank 0 steps in round 3 of 'g'"),
        ({"part": 99}, "no states 99"),
        ({"rank": 1}, "local rank 1 has no states"),
        ({"segments": (_numbers(0, 100_000),)}, "a step of 100000 elements with states of 2"),
        ({"segments": (_numbers(3, 2),)}, "not in order"),
        ({"segments": (_numbers(0, 2), _numbers(1, 2))}, "not in order"),
        ({"segments": (SegmentNumbers(0, 2, (1.0,)),)}, "not in order"),
    ],
    ids=str,
)
def test_nonsense_is_refused(service: Service, changed: dict[str, Any], said: str) -> None:
    part = service.host()
    service.ready(GRADIENTS, {0: [0.0] * COUNT, 2: [0.0] * COUNT})
    fields = dict(changed)
    rank = fields.pop("rank", 0)
    with pytest.raises(ProtocolError, match=said):
        service.step(fields.pop("part", part), fields.pop("round", 1), rank, **fields)
    assert not service.due


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"source": 2}, "no slot 2"),
        ({"target": 9}, "no slot 9"),
        ({"source": 1}, "steps of"),
        ({"before": 4}, "no states 4"),
        *(
            ({"step_kind": code}, "kind of a step|steps of")
            for code in (1 << 20, 3 << 2 | 1 << 9 | 1 << 13, 1 << 9, 5 << 9 | 1 << 13)
        ),
    ],
    ids=str,
)
def test_states_that_can_not_be_kept(service: Service, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        service.host(**changed)


def test_states_go_on_with_slots_that_were_declared_again(service: Service) -> None:
    part = service.host()
    assert service.host(before=part) == part


@pytest.mark.parametrize("leaves", [True, False])
def test_memory_is_given_back_once_no_kernel_uses_it(service: Service, leaves: bool) -> None:
    part = service.host()
    service.ready(GRADIENTS, {0: [0.0] * COUNT, 2: [0.0] * COUNT})
    service.step(part, 1)
    assert service.due
    if leaves:
        service.hosting.forget(0)
    else:
        service.hosting.release(service.rank(), protocol.DropStates(part))
    assert not service.freed
    service.run()
    assert len(service.freed) == 2
    assert not service.ranks[0].said
    with pytest.raises(ProtocolError, match="no states"):
        service.step(part, 2)


@pytest.mark.parametrize("is_last", [True, False])
def test_a_sum_that_comes_after_its_rank_has_left_makes_no_step(service: Service, is_last: bool) -> None:
    part = service.host()
    slot = service.slots[0]
    service.carry_out(service.pipeline.handle(BytesReady(slot, 1, GRADIENTS.nbytes), 0.0))
    service.step(part, 1, is_last=is_last)
    service.hosting.forget(0)
    service.carry_out(service.pipeline.handle(BytesReady(service.slots[2], 1, GRADIENTS.nbytes), 0.0))
    assert not service.due


def test_a_rank_may_leave_during_the_first_of_two_steps(service: Service) -> None:
    part = service.host()
    service.ready(GRADIENTS, {0: [0.0] * COUNT, 2: [0.0] * COUNT})
    service.step(part, 1, is_last=False)
    service.hosting.forget(0)
    service.run()
    assert len(service.freed) == 2


def test_segments_may_leave_elements_out() -> None:
    check_order([StepSegment(range(2), (0.1, float("inf"))), StepSegment(range(5, 9), (1.0, 2.0))], 2)
