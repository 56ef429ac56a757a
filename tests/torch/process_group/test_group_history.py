"""Ranks repeat the operations of their groups before the first step: group_history.py and meeting_store.py."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from byteps_py.torch.collectives.group_history import GroupHistory
from byteps_py.torch.collectives.meeting_store import MeetingStore

CALLS = ("allreduce", "broadcast", "shutdown")


class Group:
    """Notes what is done by it."""

    def __init__(self, name: str, said: list[Any], rank: int = 0) -> None:
        self.name, self._said, self._rank = name, said, rank

    def rank(self) -> int:
        return self._rank

    def begin_anew(self) -> None:
        self._said.append(f"{self.name} anew")

    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> None:
        self._said.append((self.name, tensors[0].tolist()))
        tensors[0].fill_(-1)
        if opts == "nested":
            self.broadcast(tensors, SimpleNamespace(rootRank=0))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> None:
        self._said.append((self.name, tensors[0].numel(), tensors[0].data_ptr()))

    def shutdown(self) -> None:
        self._said.append(f"{self.name} ends")


class History:
    def __init__(self) -> None:
        self.said: list[Any] = []
        self.history = GroupHistory(lambda: self.said.append("meet"))

    def group(self, name: str, rank: int = 0) -> Group:
        group = Group(name, self.said, rank)
        self.history.made(group, CALLS)
        return group


@pytest.fixture
def one() -> History:
    return History()


def test_calls_before_the_first_step_are_made_again_in_order(one: History) -> None:
    world = one.group("world")
    values = torch.tensor([1.0, 2.0])
    world.allreduce([values])
    row = one.group("row")
    row.allreduce([torch.tensor([3.0])], opts="nested")
    row.shutdown()
    one.history.restored()
    world.allreduce([torch.tensor([4.0])])
    one.history.over(counts=False)
    world.allreduce([torch.tensor([5.0])])
    for _ in range(2):
        one.said.clear()
        one.history.begin_anew()
        (nested,) = (said for said in one.said if said[:2] == ("row", 1))
        assert one.said == ["meet", "world anew", ("world", [1.0, 2.0]), "row anew", ("row", [3.0]), nested, "row ends"]
        one.said.clear()
        one.history.go_on()
        assert one.said == [("world", [4.0])]
    assert values.tolist() == [-1.0, -1.0], "the inputs were not copied"
    assert not one.history.refusal
    assert not set(CALLS) & set(vars(world)), "calls are recorded after the first step"


def test_calls_after_the_first_step_are_counted(one: History) -> None:
    world = one.group("world")
    one.history.restored()
    one.history.over()
    before = one.history.calls
    world.allreduce([torch.tensor([5.0])])
    assert one.history.calls == before + 1
    one.said.clear()
    one.history.begin_anew()
    assert one.said == ["meet", "world anew"]
    assert one.history.calls == before + 1


@pytest.mark.parametrize("rank", [0, 1])
def test_large_tensors_of_a_broadcast_are_not_copied(rank: int, one: History) -> None:
    group, large = one.group("world", rank), torch.zeros(1 << 19)
    group.broadcast([large], SimpleNamespace(rootRank=1))
    one.history.restored()
    one.history.over()
    one.said.clear()
    one.history.begin_anew()
    *_, (_, count, address) = one.said
    assert count == large.numel()
    assert (address == large.data_ptr()) is (rank == 1), "only the root's are read, and the others' are not replaced"


def test_groups_that_cannot_begin_anew_say_why(one: History) -> None:
    one.history.over()
    assert one.history.refusal == "the script has called no restore(), and has no RunState"


def test_a_late_group_is_refused(one: History) -> None:
    one.history.restored()
    one.history.over()
    one.group("late")
    assert one.history.refusal == "a group was made after the first step"


def test_too_many_bytes_are_refused(one: History) -> None:
    class Large(Group):
        def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> None:
            self._said.append("large")

    group = Large("world", one.said)
    one.history.made(group, CALLS)
    group.allreduce([torch.empty(1 << 26)])
    assert one.said == ["large"]
    assert one.history.refusal == "before the first step, operations of torch.distributed had more than 256.0 MB"


def test_groups_of_other_backends_are_refused(one: History) -> None:
    groups = [one.group("world")]
    one.history.groups = lambda: groups
    assert not one.history.refusal
    groups.append(Group("gloo", []))
    assert one.history.refusal == "a group has another backend than byteps"


def new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)


new_store()  # the first one opens pipes that stay


def test_stores_of_groups_move() -> None:
    meeting = MeetingStore(new_store())
    store = PrefixStore("world/", PrefixStore("default/", meeting))
    store.set("who", "rank 0")
    assert (store.get("who"), store.add("count", 2), store.check(["who"])) == (b"rank 0", 2, True)
    store.wait(["who"], timedelta(seconds=1))
    assert store.compare_set("who", "rank 0", "rank 1") == b"rank 1"
    assert store.delete_key("who")
    assert store.num_keys() > 0
    port = meeting.port
    meeting.move(new_store())
    assert meeting.port != port
    assert not store.check(["count"])
    assert store.add("count", 1) == 1
