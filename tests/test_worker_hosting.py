"""States that a service keeps for its ranks: steps are made once, and nonsense is refused."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from byteps_py import rank_protocol as protocol
from byteps_py.errors import ProtocolError
from byteps_py.kernels.step_segments import StepSegment, segments_of
from byteps_py.kernels.update_rules import SCALARS, Hyperparameters, Method, StepKind, UpdateRule, step_scalars
from byteps_py.rank_protocol import RankMessageKind
from byteps_py.shm import Arena, Block
from byteps_py.tensors import DType
from byteps_py.worker.io.executor import Executor
from byteps_py.worker.io.memory import Memory
from byteps_py.worker.io.rank_connection import RankConnection
from byteps_py.worker.ranks.hosting import Hosting

KIND = StepKind(UpdateRule(Method.SGD, momentum=True), DType.FLOAT32, DType.FLOAT32)
COUNT = 5
Done = Callable[[BaseException | None], None]


@dataclass
class Rank:
    local_rank: int
    arena: Arena
    said: list[tuple[RankMessageKind, dict[str, Any]]] = field(default_factory=list)

    def allocate(self, nbytes: int) -> Block:
        return self.arena.allocate(nbytes)

    def send(self, message: bytes) -> None:
        self.said.append((protocol.kind_of(message), protocol.fields_of(message)))


class Service:
    """A service with two ranks and a slot of each, whose kernels run when they are told to."""

    def __init__(self) -> None:
        self.arena = Arena(1 << 16)
        self.ranks = [Rank(local_rank, self.arena) for local_rank in (0, 1)]
        self.freed: list[Block] = []
        self.due: list[tuple[Callable[[], None], Done]] = []
        self.blocks = [self.arena.allocate(4 * COUNT) for _ in range(2)]
        slots = {
            number: SimpleNamespace(local_rank=0, result=self.blocks[0], inputs=(self.blocks[1],), round=0)
            for number in (1, 2)
        }
        slots[3] = SimpleNamespace(local_rank=1, result=self.blocks[0], inputs=(self.blocks[1],), round=0)
        memory = SimpleNamespace(slots=slots, free_states=lambda rank, blocks: self.freed.extend(blocks))
        executor = SimpleNamespace(run_kernel=lambda work, done: self.due.append((work, done)))
        self.hosting = Hosting(cast(Memory, memory), cast(Executor, executor))

    def rank(self, local_rank: int = 0) -> RankConnection:
        return cast(RankConnection, self.ranks[local_rank])

    def run(self, error: BaseException | None = None) -> None:
        due, self.due = self.due, []
        for work, done in due:
            work()
            done(error)

    def host(self) -> int:
        self.hosting.host(self.rank(), {"request": 7, "step_kind": KIND.code, "count": COUNT})
        self.run()
        kind, fields = self.ranks[0].said.pop()
        assert (kind, fields["request"], len(fields["states"])) == (RankMessageKind.HOSTED, 7, 2)
        return int(fields["id"])

    def floats(self, block: Block) -> memoryview:
        view = self.arena.segments[block.segment].view
        return view[block.offset : block.offset + 4 * COUNT].cast("f")

    def step(self, part: int, number: int, rank: int = 0, **changed: Any) -> None:
        scalars = step_scalars(KIND.rule, Hyperparameters(lr=0.5, momentum=0.5), max(1, number))
        segments = [StepSegment(range(1, COUNT), scalars).to_json()]
        said = {"part": part, "step": number, "source": 1, "target": 2, "segments": segments, **changed}
        self.hosting.step(self.rank(rank), said)


@pytest.fixture
def service() -> Any:
    service = Service()
    yield service
    service.arena.close()


def test_a_step_is_made_once(service: Service) -> None:
    part = service.host()
    service.floats(service.blocks[0])[:] = array("f", [1, 2, 3, 4, 5])
    for number in (1, 2):
        service.step(part, number)
        assert not service.ranks[0].said
        service.run()
        assert service.ranks[0].said.pop() == (RankMessageKind.STEPPED, {"part": part, "step": number})
    # The first moment is the gradient, the second one and a half of it.
    expected = [0.0, *(-0.5 * value - 0.75 * value for value in (2, 3, 4, 5))]
    assert list(service.floats(service.blocks[1])) == [0.0, *expected[1:]]
    service.step(part, 2)  # again
    assert not service.due
    assert service.ranks[0].said.pop() == (RankMessageKind.STEPPED, {"part": part, "step": 2})


def test_an_error_of_a_kernel_is_told(service: Service) -> None:
    part = service.host()
    service.step(part, 1)
    service.run(MemoryError("none left"))
    assert service.ranks[0].said.pop()[1] == {
        "part": part, "step": 1, "error": "CommunicationError", "message": "none left",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"step": 3}, "step 3 of states whose step 0 is the latest"),
        ({"step": -1, "part": 99}, "no states 99"),
        ({"rank": 1}, "local rank 1 has no states"),
        ({"source": 3}, "no slot 3"),
        ({"target": 9}, "no slot 9"),
        ({"segments": [[0, 100_000, *[0.0] * SCALARS]]}, "a step of 100000 elements in memory of"),
        ({"segments": [[3, 2, *[0.0] * SCALARS]]}, "not in order"),
        ({"segments": [[0, 3, *[0.0] * SCALARS], [2, 4, *[0.0] * SCALARS]]}, "not in order"),
        ({"segments": [[0, 2, 1.0]]}, "not in order"),
        ({"segments": [["a"]]}, "malformed segments"),
        ({"segments": 5}, "malformed segments"),
    ],
    ids=str,
)
def test_nonsense_is_refused(service: Service, changed: dict[str, Any], said: str) -> None:
    part = service.host()
    number, rank = changed.pop("step", 1), changed.pop("rank", 0)
    with pytest.raises(ProtocolError, match=said):
        service.step(changed.pop("part", part), number, rank, **changed)
    assert not service.due


def test_a_step_while_one_is_made_is_refused(service: Service) -> None:
    part = service.host()
    service.step(part, 1)
    for number in (1, 2):
        with pytest.raises(ProtocolError, match="is the latest"):
            service.step(part, number)


@pytest.mark.parametrize(
    "kind", [-1, 1 << 20, 3 << 2 | 1 << 9 | 1 << 13, 1 << 9, 5 << 9 | 1 << 13, None, "SGD"], ids=str
)
def test_kinds_that_are_none(service: Service, kind: Any) -> None:
    with pytest.raises(ProtocolError):
        service.hosting.host(service.rank(), {"request": 1, "step_kind": kind, "count": 1})
    with pytest.raises(ProtocolError, match="states of 0 elements"):
        service.hosting.host(service.rank(), {"request": 1, "step_kind": KIND.code, "count": 0})


@pytest.mark.parametrize("leaves", [True, False])
def test_memory_is_given_back_once_no_kernel_uses_it(service: Service, leaves: bool) -> None:
    part = service.host()
    service.step(part, 1)
    if leaves:
        service.hosting.forget(0)
    else:
        service.hosting.release(service.rank(), {"part": part})
    assert not service.freed
    service.run()
    assert len(service.freed) == 2
    assert not service.ranks[0].said
    with pytest.raises(ProtocolError, match="no states"):
        service.step(part, 2)


def test_segments_travel() -> None:
    segments = [StepSegment(range(2), (0.1, float("inf"))), StepSegment(range(5, 9), (1.0, 2.0))]
    assert segments_of([segment.to_json() for segment in segments], 2) == segments
