"""Which step can be restored from what servers hold: a table of who holds what, and a sentence or a step."""

from __future__ import annotations

import doctest
import json
from collections.abc import Sequence

import pytest

from byteps_py.kernels.update_rules import Method, StepKind, UpdateRule
from byteps_py.shadow import NotRestorable, Restorable, ServerDescription, latest_step, restorable
from byteps_py.tensors import DType
from byteps_py.wire.data_link import HeldPartition, HeldRun, ShadowDescription, ShadowPartition, ShadowRecord

SGD = StepKind(UpdateRule(Method.SGD), DType.FLOAT32, DType.FLOAT32)
ADAM = StepKind(UpdateRule(Method.ADAM), DType.FLOAT32, DType.FLOAT32)
RUN = 5


def part(
    name: str, first: int, count: int, steps: Sequence[int], *, index: int = 0, kind: StepKind = SGD
) -> HeldPartition:
    """``steps``: that it can deliver; the first is that of its states."""
    said = ShadowPartition(run=RUN, name=name, first=first, count=count, step_kind=kind.code, step=steps[0])
    return HeldPartition(key=hash(name) & 0xFF, index=index or first, partition=said, steps=tuple(steps[1:]))


def record(
    step: int, parts: object, *, rank: int = 0, size: int = 1, run: int = RUN, ranks: Sequence[int] = ()
) -> ShadowRecord:
    """``parts``: (name, count, last step) of each tensor. ``ranks``: that share them."""
    said = {"parts": parts, "params": {}, "kinds": {}, "steps": {}, "ranks": ranks}
    common = json.dumps(said).encode() if rank == (ranks[0] if ranks else 0) else b""
    return ShadowRecord(run=run, step=step, rank=rank, size=size, common=common)


def server(
    name: str, *said: HeldPartition | ShadowRecord, run: int = RUN, age_s: float = 1.0, error: str = ""
) -> ServerDescription:
    parts = tuple(each for each in said if isinstance(each, HeldPartition))
    records = tuple(each for each in said if isinstance(each, ShadowRecord))
    held = HeldRun(run=run, age_s=age_s, partitions=parts, records=records)
    return ServerDescription(name, ShadowDescription((held,) if said else ()), error)


def restored(*servers: ServerDescription) -> tuple[int, dict[str, list[tuple[str, int, int]]]]:
    """The step; and of each tensor, from which server which elements are taken."""
    found = latest_step(servers)
    assert isinstance(found, Restorable), found
    return found.step, {
        name: [(each.server, each.elements.start, each.elements.stop) for each in parts]
        for name, parts in found.tensors.items()
    }


def reason(*servers: ServerDescription) -> str:
    found = latest_step(servers)
    assert isinstance(found, NotRestorable), found
    return found.reason


def test_nothing_is_held() -> None:
    assert latest_step([]) is None
    assert latest_step([server("a")]) is None


def test_the_newest_step_with_a_record_that_all_parts_can_deliver() -> None:
    one = server("a", part("w", 0, 4, [7, 8, 9]), record(8, [["w", 8, 8]]))
    two = server("b", part("w", 4, 4, [8, 9, 10]), record(7, [["w", 8, 7]]), record(10, [["w", 8, 10]]))
    assert restored(one, two) == (8, {"w": [("a", 0, 4), ("b", 4, 8)]})


def of_two_parts(*held: HeldPartition, last: int = 8) -> ServerDescription:
    """Ranks 0 and 2 share one part of a model, 1 and 3 the other, which has made step ``last``."""
    one = [record(8, [["w", 8, 8]], rank=rank, size=4, ranks=(0, 2)) for rank in (0, 2)]
    other = [record(8, [["v", 4, last]], rank=rank, size=4, ranks=(1, 3)) for rank in (1, 3)]
    return server("a", *held, *one, *other)


def test_all_parts_of_a_model_are_needed() -> None:
    """As of the step that all of them have made."""
    both = part("w", 0, 8, [7, 8]), part("v", 0, 4, [8, 9])
    assert restored(of_two_parts(*both)) == (8, {"w": [("a", 0, 8)], "v": [("a", 0, 4)]})
    found = latest_step([of_two_parts(*both)])
    assert isinstance(found, Restorable)
    assert found.commons.keys() == {(0, 2), (1, 3)}
    assert found.common["parts"] == [["w", 8, 8]]
    of_others = found.of_ranks((1, 3))
    assert of_others is not None
    assert of_others.common["parts"] == [["v", 4, 8]]
    assert found.of_ranks(()) is None
    assert "'v' are missing as of step 8" in reason(of_two_parts(both[0], part("v", 0, 4, [9])))
    assert restored(of_two_parts(both[0], part("v", 0, 4, [3]), last=3))[0] == 8


def test_a_part_of_which_no_record_speaks() -> None:
    one = [record(8, [["w", 8, 8]], rank=rank, size=3, ranks=(0, 2)) for rank in (0, 2)]
    silent = ShadowRecord(run=RUN, step=8, rank=1, size=3, common=b"")
    assert "step 8: no record says what ranks 1 share" in reason(server("a", part("w", 0, 8, [8]), *one, silent))
    broken = ShadowRecord(run=RUN, step=8, rank=1, size=3, common=b'{"parts": 5}')
    assert "step 8: the record of rank 1 is damaged" in reason(server("a", part("w", 0, 8, [8]), *one, broken))


def test_a_tensor_that_no_step_changed_has_an_older_last_step() -> None:
    frozen = server("a", part("w", 0, 4, [9, 10]), part("frozen", 0, 4, [3]))
    said = server("b", record(9, [["w", 4, 9], ["frozen", 4, 3]]), record(10, [["w", 4, 10], ["frozen", 4, 3]]))
    assert restored(frozen, said)[0] == 10


def test_of_servers_that_hold_the_same_any_that_can_deliver_is_taken() -> None:
    late = server("a", part("w", 0, 8, [9]))
    moved = server("b", part("w", 0, 8, [7, 8]), record(8, [["w", 8, 8]]))
    assert restored(late, moved) == (8, {"w": [("b", 0, 8)]})


def test_parts_of_two_cuts_of_a_tensor_cover_it_together() -> None:
    """It was declared again, and cut otherwise."""
    one = server("a", part("w", 0, 6, [8]), part("w", 6, 2, [7], index=1), record(8, [["w", 8, 8]]))
    two = server("b", part("w", 4, 4, [8]), part("w", 0, 4, [5], index=1))
    assert restored(one, two) == (8, {"w": [("a", 0, 6), ("b", 6, 8)]})
    found = latest_step([one, two])
    assert isinstance(found, Restorable)
    assert [each.first for each in found.tensors["w"]] == [0, 4]


def test_a_run_that_was_ended_in_its_first_step_begins_again() -> None:
    """An older run, or a silent server, may hold more."""
    begun = part("w", 0, 2, [1])
    first = server("a", begun, record(1, [["w", 4, 1]], size=2))
    assert latest_step([first]) is None
    assert latest_step([server("a", begun)]) is None
    assert "records of ranks 1 of 2" in reason(server("a", part("w", 0, 2, [2]), record(1, [["w", 4, 1]], size=2)))
    assert "records of ranks 1 of 2" in reason(server("a", begun, record(2, [["w", 4, 1]], size=2)))
    assert "gave no answer: lost" in reason(first, server("b", error="lost"))
    old = server("c", part("w", 0, 4, [7]), record(7, [["w", 4, 7]]), run=4, age_s=9)
    found = latest_step([first, old])
    assert isinstance(found, Restorable)
    assert (found.run, found.step) == (4, 7)


def test_every_rank_has_a_record() -> None:
    held = part("w", 0, 4, [1, 2, 3])
    all_ = [record(2, [["w", 4, 2]], size=3), record(2, [], rank=1, size=3), record(2, [], rank=2, size=3)]
    assert restored(server("a", held, *all_))[0] == 2
    newer = [record(3, [["w", 4, 3]], size=3), record(3, [], rank=2, size=3)]
    assert restored(server("a", held, *all_, *newer))[0] == 2
    assert reason(server("a", held, *newer)) == "step 3: the records of ranks 1 of 3 are missing"


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([part("w", 0, 4, [8])], "elements 4 to 8 of 'w' are missing as of step 8: no server has them"),
        ([part("w", 4, 4, [8])], "elements 0 to 4 of 'w' are missing as of step 8: no server has them"),
        (
            [part("w", 0, 4, [8]), part("w", 4, 4, [5, 6])],
            "elements 4 to 8 of 'w' are missing as of step 8: servers have them as of step 5, 6",
        ),
        ([part("v", 0, 8, [8])], "elements 0 to 8 of 'w' are missing as of step 8: no server has them"),
        (
            [part("w", 0, 4, [8]), part("w", 4, 4, [8], kind=ADAM)],
            f"the parts of 'w' are of different kinds of steps, {SGD} and {ADAM}",
        ),
    ],
)
def test_why_a_step_can_t_be_restored(parts: list[HeldPartition], sentence: str) -> None:
    assert reason(server("a", *parts, record(8, [["w", 8, 8]]))) == f"step 8: {sentence}"


@pytest.mark.parametrize(
    "common",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"parts": 3}',
        b'{"parts": [["w"]]}',
        b'{"parts": [[1, 2, 3]], "params": {}, "kinds": {}, "steps": {}}',
        b'{"parts": [["w", 1, 3]], "params": {"w": ["w"]}, "kinds": {"w": []}, "steps": {"w": []}}',
        b'{"parts": [["w", 1, 3]], "params": {"w": 3}, "kinds": {"w": []}, "steps": {"w": 3}}',
    ],
)
def test_a_damaged_record_is_none(common: bytes) -> None:
    damaged = ShadowRecord(run=RUN, step=8, rank=0, size=1, common=common)
    assert reason(server("a", part("w", 0, 8, [8]), damaged)) == "step 8: the record of rank 0 is damaged"


def test_states_without_a_record() -> None:
    assert reason(server("a", part("w", 0, 8, [8]))) == "there is no record of a step, but states of w"


def test_servers_that_give_no_answer_are_named() -> None:
    silent = server("b", error="it is frozen")
    assert reason(silent) == "the server at b gave no answer: it is frozen"
    found = reason(server("a", record(8, [["w", 8, 8]])), silent)
    assert found.endswith("no server has them; the server at b gave no answer: it is frozen")


def test_the_run_that_was_heard_of_last_counts_unless_nothing_of_it_can_be_restored() -> None:
    old = server("a", part("w", 0, 4, [8]), record(8, [["w", 4, 8]]), age_s=100.0)
    new = server("a", part("w", 0, 4, [3]), record(3, [["w", 4, 3]], run=6), run=6, age_s=2.0)
    found = latest_step([old, new])
    assert isinstance(found, Restorable)
    assert (found.run, found.step) == (6, 3)
    begun = server("a", part("w", 0, 2, [8]), record(8, [["w", 4, 8]], run=6), run=6)
    assert restored(old, begun)[0] == 8
    assert reason(begun).startswith("step 8: elements 2 to 4 of 'w' are missing")


def test_an_empty_tensor_needs_nobody() -> None:
    assert restored(server("a", record(8, [["w", 0, 8]]))) == (8, {"w": []})


def test_the_doctest() -> None:
    assert doctest.testmod(restorable).failed == 0
