"""Copies of optimizer states at servers of other machines: when they are made, what is sent, what counts as held."""

from __future__ import annotations

import pytest
from support.worker_core import slot, tensor

from byteps_py.kernels.optimizer_steps import StepSegment
from byteps_py.proto import control_pb2 as pb
from byteps_py.tensors import DType, TensorSpec
from byteps_py.worker.core import IllegalTransitionError
from byteps_py.worker.core.hosted_steps import OwnedPart, SumForOwner
from byteps_py.worker.core.shadow_copies import (
    CatchUp,
    CopyProgress,
    CopyStates,
    PartitionStepped,
    RecordPacked,
    ReleaseMemory,
    SendEnd,
    SendRecord,
    SendStates,
    SendStep,
    ServerHolds,
    ServerLacks,
    ServerReconnected,
    StatesEnded,
    StatesWatched,
    StepBegun,
    StepDue,
    StepMade,
    StepNumbers,
    TellHeld,
    TellRecorded,
    TopologyChanged,
)
from byteps_py.worker.core.shadowing import CopyServers, Shadowing
from byteps_py.worker.core.tensor import Tensor
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.io.executor import Executor

RUN = 5
SPEC = TensorSpec("g", DType.FLOAT32, (16,), ownership="g")
#: Servers 1 and 2 are on machines 0 and 1, server 3 and 4 on CPU machines.
GPU, CPU = (1, 2), (3, 4)


def topology(*servers: int, machines: int = 2, epoch: int = 1, copies: int = 1) -> Topology:
    workers = [
        pb.Member(machine_index=i, machine_id=f"m{i}", first_rank=i, local_size=1, host=f"h{i}")
        for i in range(machines)
    ]
    members = [
        pb.Member(
            member_id=each, kind=pb.MACHINE_KIND_GPU if each in GPU else pb.MACHINE_KIND_CPU, weight=1,
            machine_id=f"m{each - 1}", machine_index=each - 1 if each in GPU else -1,
        )
        for each in servers
    ]  # fmt: skip
    return Topology(epoch, 0, tuple(workers), tuple(members), 4096, 1, shadow_copies=copies)


class Machine:
    """Machine 0, whose rank 0 owns two partitions; server 3 adds the first one, this machine's own the second one."""

    def __init__(self, *servers: int, credit: int = 1 << 20, adds: tuple[int, int] = (3, 1), copies: int = 1) -> None:
        self.core: Shadowing[str] = Shadowing(topology(*(servers or (*GPU, 3)), copies=copies), credit)
        self.gradients = self._gradients(1)
        self.parts = self._parts(self.gradients, adds)
        self.step = 0
        assert self.core.handle(StatesWatched(0, RUN, [(part, 100) for part in self.parts])) == []

    @staticmethod
    def _gradients(generation: int) -> Tensor:
        made = tensor([slot(0, SPEC)], contributions=True)
        made.generation = generation
        return made

    @staticmethod
    def _parts(gradients: Tensor, adds: tuple[int, int]) -> list[OwnedPart]:
        return [
            OwnedPart(gradients, i, 32 * i, 32, server, owner=0, is_own=True, first=8 * i)
            for i, server in enumerate(adds)
        ]

    def make_step(self, with_record: bool = True, durable: int = 0) -> list[object]:
        """Both partitions step; the names of memory tell what it is of."""
        self.step += 1
        self.core.handle(StepBegun(0, self.step, self.parts))
        record = RecordPacked(0, RUN, self.step, f"record {self.step}")
        found: list[object] = list(self.core.handle(record)) if with_record else []
        for part in self.parts:
            states = f"states {part.index} {self.step}" if self.core.handle(StepDue(part)) else None
            total = f"sum {part.index} {self.step}" if self.core.needs_sum(part) else None
            segments = (StepSegment(range(8), (float(self.step),)),)
            made = StepMade(StepNumbers(self.step, durable), 10 * self.step, 2, segments)
            found += self.core.handle(PartitionStepped(part, made, states, total))
        return found

    def hold(self, actions: list[object]) -> list[object]:
        """The servers have got all of that."""
        found: list[object] = []
        for action in actions:
            if isinstance(action, SendRecord):
                found += self.core.handle(ServerHolds(action.server, (action.run, action.rank), action.step))
            elif isinstance(action, (SendStates, SendStep)):
                found += self.core.handle(ServerHolds(action.server, action.copy.part.place, action.step))
        return found

    def follow(self) -> None:
        """All partitions are in step."""
        self.hold(self.make_step())

    def place(self, index: int) -> tuple[int, int]:
        return self.gradients.key, index


def kinds(actions: list[object]) -> list[str]:
    """All but CatchUp, which matters on a machine alone."""
    return [type(action).__name__ for action in actions if not isinstance(action, CatchUp)]


def ended(actions: list[object]) -> list[tuple[int, int]]:
    """(server, index of the partition)."""
    return [(each.server, each.part.index) for each in actions if isinstance(each, SendEnd)]


def held(actions: list[object]) -> list[int]:
    return [action.step for action in actions if isinstance(action, TellHeld)]


def released(actions: list[object]) -> list[object]:
    return [action.memory for action in actions if isinstance(action, ReleaseMemory)]


def test_states_are_copied_after_the_first_step_and_steps_follow() -> None:
    machine = Machine()
    first = machine.make_step()
    assert kinds(first) == ["SendRecord", "SendStates", "SendStates"]
    assert all(isinstance(each, SendRecord | SendStates) and each.server == 3 for each in first)
    assert held(machine.hold(first[:1])) == [1]  # partitions that have no copy yet do not count
    assert released(machine.hold(first[1:])) == ["states 0 1", "states 1 1"]

    second = machine.make_step(durable=1)
    steps = [each for each in second if isinstance(each, SendStep)]
    assert [(each.before, each.made.numbers.step, each.made.round, each.made.numbers.durable) for each in steps] == [
        (1, 2, 20, 1)
    ] * 2
    # Server 3 has added the first partition's sum itself.
    assert [each.held.memory if each.held else None for each in steps] == [None, "sum 1 2"]
    assert held(machine.hold(second[:2])) == []
    assert kinds(machine.hold(second[2:])) == ["ReleaseMemory", "TellHeld"]


def test_a_step_can_be_restored_once_all_states_have_a_copy() -> None:
    machine = Machine()
    assert machine.core.restorable_step == 0
    first = machine.make_step()
    machine.hold(first[:2])
    assert machine.core.restorable_step == 0  # one of two partitions is copied
    machine.hold(first[2:])
    assert machine.core.restorable_step == 1
    machine.hold(machine.make_step())
    assert machine.core.restorable_step == 2
    machine.core.handle(TopologyChanged(topology(machines=2, epoch=2)))  # its server is gone
    assert machine.core.restorable_step == 0
    machine.core.handle(StatesEnded(machine.parts))
    assert machine.core.restorable_step is None


def test_a_step_is_held_only_once_all_its_partitions_have_made_it() -> None:
    machine = Machine()
    machine.follow()
    machine.core.handle(StepBegun(0, 2, machine.parts))
    record = machine.core.handle(RecordPacked(0, RUN, 2, "record"))
    assert held(machine.hold(record)) == []
    made = StepMade(StepNumbers(2, 0), 20, 2, ())
    for part, is_last in zip(machine.parts, (False, True), strict=True):
        sent = machine.core.handle(PartitionStepped(part, made, None, "sum" if machine.core.needs_sum(part) else None))
        assert held(machine.hold(sent)) == ([2] if is_last else [])


def test_an_earlier_step_keeps_later_ones_from_being_held() -> None:
    machine = Machine()
    machine.follow()
    second, third = machine.make_step(), machine.make_step()
    assert held(machine.hold(third)) == []
    assert held(machine.hold(second)) == [3]
    assert machine.hold(second) == []  # said twice


def test_a_rank_is_told_when_all_its_partitions_have_followed() -> None:
    machine = Machine(credit=150)
    told = [each for _ in range(3) for each in machine.hold(machine.make_step()) if isinstance(each, TellHeld)]
    # The record's answer comes first here: the states of a step count from the next one on.
    assert [(each.step, each.is_whole) for each in told] == [(1, False), (2, False), (3, True)]


def test_the_credit_bounds_what_is_on_its_way() -> None:
    machine = Machine(credit=150)
    first = machine.make_step()
    assert kinds(first) == ["SendRecord", "SendStates"]
    machine.hold(first)
    second = machine.make_step()
    assert kinds(second) == ["SendRecord", "SendStep", "SendStates"]
    machine.hold(second)
    assert kinds(machine.make_step()) == ["SendRecord", "SendStep", "SendStep"]


def test_one_partition_is_copied_whatever_the_credit() -> None:
    assert kinds(Machine(credit=1).make_step()) == ["SendRecord", "SendStates"]


def test_what_is_not_acknowledged_is_sent_again_in_order() -> None:
    machine = Machine()
    first, second = machine.make_step(), machine.make_step()
    assert machine.core.handle(ServerReconnected(3)) == [*first, *second]
    machine.hold(first)
    assert machine.core.handle(ServerReconnected(3)) == second
    machine.hold(second)
    assert machine.core.handle(ServerReconnected(3)) == []


def test_a_sum_waits_until_the_server_has_the_one_before() -> None:
    machine = Machine()
    machine.follow()
    assert not any(machine.core.is_behind(part) for part in machine.parts)
    sent = machine.make_step()
    assert [machine.core.is_behind(part) for part in machine.parts] == [False, True]  # the server adds the other one
    found = machine.hold(sent)
    assert [each.part for each in found if isinstance(each, CatchUp)] == [machine.parts[1]]
    assert not machine.core.is_behind(machine.parts[1])


def test_steps_behind_the_states_are_waited_for_once_the_states_are_there() -> None:
    machine = Machine()
    machine.follow()
    machine.hold(machine.make_step())
    machine.core.handle(ServerLacks(3, machine.place(1), 2))
    states = machine.make_step()  # of partition 1, and a step of the other one
    behind = machine.make_step()
    assert held(machine.hold(behind[:2])) == []
    assert held(machine.hold(states[::-1])) == [3]  # it follows, and step 4 is on its way
    assert held(machine.hold(behind[2:])) == [4]


def recorded(actions: list[object]) -> list[tuple[int, int]]:
    """(run, step) of records that a rank need not wait for any more."""
    return [(each.run, each.step) for each in actions if isinstance(each, TellRecorded)]


def test_a_rank_hears_when_a_server_has_a_large_record_or_none_takes_it() -> None:
    machine = Machine(*GPU, *CPU)
    for step in range(2, 6):
        assert recorded(machine.core.handle(RecordPacked(0, RUN, step, f"record {step}", is_paced=step != 5))) == []
    assert recorded(machine.core.handle(ServerHolds(3, (RUN, 0), 2))) == [(RUN, 2)]
    assert recorded(machine.core.handle(ServerHolds(3, (RUN, 0), 2))) == []
    assert recorded(machine.core.handle(ServerLacks(3, (RUN, 0), 3))) == [(RUN, 3)]
    assert recorded(machine.core.handle(ServerHolds(3, (RUN, 0), 5))) == []
    moved = machine.core.handle(TopologyChanged(topology(*GPU, 4, epoch=2)))
    assert [(each.server, each.step) for each in moved if isinstance(each, SendRecord)] == [(4, 4)]
    assert recorded(moved) == []
    assert machine.core.awaits_record(4, (RUN, 0), 4)
    assert recorded(machine.core.handle(ServerHolds(4, (RUN, 0), 4))) == [(RUN, 4)]
    assert not machine.core.awaits_record(4, (RUN, 0), 4)
    machine.core.handle(RecordPacked(0, RUN, 6, "record 6", is_paced=True))
    assert recorded(machine.core.handle(TopologyChanged(topology(1, machines=1, epoch=3)))) == [(RUN, 6)]
    assert recorded(machine.core.handle(RecordPacked(0, RUN, 7, "record 7", is_paced=True))) == [(RUN, 7)]
    assert recorded(machine.core.handle(RecordPacked(0, RUN, 8, "record 8"))) == []


def test_a_rank_hears_which_record_was_refused_before_a_later_step_is_held() -> None:
    """So that no step up to that one is taken for durable by the ranks that hold it."""
    machine = Machine()
    machine.follow()
    second, third = machine.make_step(), machine.make_step()
    found = [*machine.core.handle(ServerLacks(3, (RUN, 0), 2)), *machine.hold(second[1:]), *machine.hold(third)]
    told = [(each.step, each.refused) for each in found if isinstance(each, TellHeld)]
    assert told == [(3, 2)]
    machine.core.handle(RecordPacked(0, RUN, 4, "record 4"))
    assert machine.core._refused == {0: 2}
    machine.core.handle(TopologyChanged(topology(1, machines=1, epoch=2)))
    assert machine.core._refused == {0: 4}, "no server is left"
    machine.core.handle(RecordPacked(0, RUN, 5, "record 5"))
    assert machine.core._refused == {0: 5}


def test_an_old_copy_stays_until_the_new_one_has_the_durable_step() -> None:
    machine = Machine(*GPU, 3)
    machine.follow()
    machine.parts[0].server = 4
    machine.core.handle(TopologyChanged(topology(*GPU, 3, 4, epoch=2)))
    machine.hold(machine.make_step())  # states as of step 2 at server 4
    third = machine.make_step(durable=1)
    assert ended(machine.make_step(durable=3)) == []
    machine.hold(third)
    assert (3, 0) in ended(machine.make_step(durable=3))


def test_a_server_that_lacks_something_gets_the_states_again() -> None:
    machine = Machine()
    machine.follow()
    sent = machine.make_step()
    machine.hold(sent[:2])  # the record, and the first partition's step
    lost = machine.core.handle(ServerLacks(3, machine.place(1), 2))
    assert kinds(lost) == ["TellHeld", "ReleaseMemory"]  # it is waited for no more
    third = machine.make_step()
    assert kinds(third) == ["SendRecord", "SendStep", "SendStates"]
    assert machine.core.handle(ServerLacks(3, machine.place(1), 2)) == []  # that was said of the states before
    assert kinds(machine.hold(third[2:])) == ["ReleaseMemory"]
    assert kinds(machine.make_step()) == ["SendRecord", "SendStep", "SendStep"]


@pytest.mark.parametrize("breaks", [False, True])
def test_what_is_on_its_way_keeps_its_memory_though_it_is_void(breaks: bool) -> None:
    """It is sent from where it lies. The server may read it until it has said so, or the connection breaks."""
    machine = Machine()
    machine.follow()
    machine.make_step()
    sent = [each for each in machine.make_step() if isinstance(each, SendStep) and each.held is not None]
    assert [each.copy.part.part.index for each in sent] == [1]
    assert kinds(machine.core.handle(ServerLacks(3, machine.place(1), 2))) == ["ReleaseMemory"]  # of step 2 alone
    if breaks:
        again = machine.core.handle(ServerReconnected(3))
        assert kinds(again).count("ReleaseMemory") == 1
        assert not [each for each in again if isinstance(each, SendStep) and each.copy.part.part.index == 1]
    else:
        assert kinds(machine.core.handle(ServerLacks(3, machine.place(1), 3))) == ["ReleaseMemory"]


def test_a_server_that_does_not_take_states_is_asked_less_and_less_often() -> None:
    machine = Machine()
    asked = []
    for _ in range(40):
        sent = machine.make_step(with_record=False)
        if any(isinstance(each, SendStates) and each.copy.part.part.index == 0 for each in sent):
            asked.append(machine.step)
            machine.core.handle(ServerLacks(3, machine.place(0), machine.step))
    assert asked == [1, 3, 7, 15, 31]


def test_a_dead_server_is_replaced() -> None:
    machine = Machine(*GPU, *CPU)
    machine.follow()
    sent = machine.make_step()
    machine.parts[0].server = 4
    changed = machine.core.handle(TopologyChanged(topology(*GPU, 4, epoch=2)))
    assert [(each.server, each.step) for each in changed if isinstance(each, SendRecord)] == [(4, 2)]
    assert held(changed) == []  # its record is not there
    again = machine.make_step()
    assert {each.server for each in again if isinstance(each, (SendStates, SendStep))} == {4}
    assert "SendStates" in kinds(again)
    machine.hold([*sent, *changed, *again])
    assert held(machine.hold(machine.make_step())) == [4]


def test_a_partition_that_moves_is_followed_at_both_servers_until_the_new_one_has_it() -> None:
    machine = Machine(*GPU, 3)
    machine.follow()
    machine.parts[0].server = 4
    assert machine.core.handle(TopologyChanged(topology(*GPU, 3, 4, epoch=2))) == []
    second = machine.make_step()
    first_parts = [
        each for each in second if isinstance(each, (SendStates, SendStep)) and each.copy.part.part.index == 0
    ]
    assert [(type(each).__name__, each.server) for each in first_parts] == [("SendStep", 3), ("SendStates", 4)]
    assert first_parts[0].held is not None
    assert first_parts[0].held.memory == "sum 0 2"  # server 3 adds it no more
    assert not [each for each in machine.hold(second) if isinstance(each, SendEnd)]  # all machines' parts may be behind
    assert not [each for each in machine.make_step(durable=1) if isinstance(each, SendEnd)]
    assert (3, 0) in ended(machine.make_step(durable=2))
    third = machine.make_step()
    assert [each.server for each in third if isinstance(each, SendStep) and each.copy.part.part.index == 0] == [4]


def test_without_cpu_machines_the_next_two_gpu_machines_have_copies() -> None:
    around = topology(1, 2, 5, 6, machines=4)
    for member in around.servers[2:]:  # of machines 2 and 3
        member.kind, member.machine_index = pb.MACHINE_KIND_GPU, member.member_id - 3
        member.machine_id = f"m{member.machine_index}"
    core: Shadowing[str] = Shadowing(around)
    assert (core.servers.members, core.servers.is_safe) == ([2, 5], True)
    machine = Machine(adds=(1, 5))
    machine.core = core
    core.handle(StatesWatched(0, RUN, [(part, 100) for part in machine.parts]))
    assert kinds(machine.make_step()).count("SendStates") == 2  # to one server with each step
    for server in (2, 5):  # what they have been sent
        machine.hold(core.handle(ServerReconnected(server)))
    second = machine.make_step()
    assert {each.server for each in second if isinstance(each, SendStates)} == {5}
    machine.hold(second)
    third = machine.make_step()
    sums = [(each.server, each.held.memory if each.held else None) for each in third if isinstance(each, SendStep)]
    assert sums == [(2, "sum 0 3"), (5, "sum 0 3"), (2, "sum 1 3"), (5, None)]
    first_answers = [each for each in third if not isinstance(each, SendStep) or each.server == 2]
    assert held(machine.hold(first_answers)) == []  # both copies count
    assert held(machine.hold(third)) == [3]
    for few in (topology(1, machines=1), topology(*GPU)):
        assert not CopyServers.of(few).is_safe


def records(actions: list[object]) -> list[int]:
    """The servers to which a record is sent."""
    return [each.server for each in actions if isinstance(each, SendRecord)]


def test_two_copies_are_on_cpu_machines_first() -> None:
    machine = Machine(*GPU, *CPU, copies=2)
    servers = machine.core.servers
    assert (servers.members, servers.copies) == ([3, 4], 2)
    assert [list(servers.of_part(part)) for part in machine.parts] == [[3, 4], [4, 3]]
    assert servers.survives == "the loss of all GPU machines and 1 CPU machine"
    machine.hold(machine.make_step())
    machine.hold(machine.make_step())
    third = machine.make_step()
    assert records(third) == [3, 4]
    assert sorted(each.server for each in third if isinstance(each, SendStep)) == [3, 3, 4, 4]
    assert held(machine.hold([each for each in third if not isinstance(each, SendRecord) or each.server == 3])) == []
    assert held(machine.hold([each for each in third if isinstance(each, SendRecord)])) == [3]
    alone = CopyServers.of(topology(*GPU, 3, copies=2))
    assert (alone.members, alone.copies) == ([3, 2], 2)  # server 1 is on this machine
    assert alone.survives == "the loss of all GPU machines, or of the CPU machine"
    few = CopyServers.of(topology(*GPU, *CPU, copies=5))
    assert (few.members, few.copies, few.asked) == ([3, 4, 2], 3, 5)


def test_with_two_copies_a_lost_server_leaves_a_step() -> None:
    machine = Machine(*GPU, *CPU, copies=2)
    machine.follow()
    machine.follow()
    step = machine.make_step()
    machine.hold(step)
    assert machine.core.restorable_step == machine.step
    machine.core.handle(TopologyChanged(topology(*GPU, 4, copies=2, epoch=2)))
    assert machine.core.restorable_step == machine.step
    after = machine.make_step()
    assert records(after) == [4, 2]


def test_a_record_that_one_of_two_servers_refuses_is_held_by_the_other() -> None:
    for first, second in ((3, 4), (4, 3)):
        machine = Machine(*GPU, *CPU, copies=2)
        machine.follow()
        machine.follow()
        step = machine.make_step()
        others = [each for each in step if not isinstance(each, SendRecord)]
        place = (RUN, 0)
        if first == 3:
            told = [*machine.core.handle(ServerLacks(first, place, machine.step)), *machine.hold(others)]
            told += machine.core.handle(ServerHolds(second, place, machine.step))
        else:
            told = [*machine.core.handle(ServerHolds(second, place, machine.step)), *machine.hold(others)]
            told += machine.core.handle(ServerLacks(first, place, machine.step))
        assert [each for each in told if isinstance(each, TellHeld)] == [TellHeld(0, machine.step, True)]


def test_a_record_that_both_servers_refuse_is_refused() -> None:
    machine = Machine(*GPU, *CPU, copies=2)
    machine.follow()
    machine.follow()
    step = machine.make_step()
    for server in (3, 4):
        machine.core.handle(ServerLacks(server, (RUN, 0), machine.step))
    assert held(machine.hold([each for each in step if not isinstance(each, SendRecord)])) == []
    refused = machine.step
    later = machine.hold(machine.make_step())
    assert [each.refused for each in later if isinstance(each, TellHeld)] == [refused]


def test_a_record_goes_to_another_server_when_one_of_two_is_lost() -> None:
    machine = Machine(*GPU, *CPU, copies=2)
    machine.follow()
    machine.follow()
    step = machine.make_step()
    machine.hold([each for each in step if not isinstance(each, SendRecord)])
    again = machine.core.handle(TopologyChanged(topology(*GPU, 4, copies=2, epoch=2)))
    assert records(again) == [2]
    machine.core.handle(ServerHolds(4, (RUN, 0), machine.step))
    assert held(machine.core.handle(ServerHolds(2, (RUN, 0), machine.step))) == [machine.step]


def test_a_server_on_the_owners_machine_keeps_no_copies() -> None:
    around = topology(*GPU, *CPU)
    around.servers[2].machine_id = "m0"  # a CPU machine's server that was started beside the trainer
    assert CopyServers.of(around).members == [4]


def test_a_new_generation_goes_on_with_its_copies() -> None:
    machine = Machine()
    machine.follow()
    machine.gradients = machine._gradients(2)
    machine.parts = machine._parts(machine.gradients, (3, 1))
    assert machine.core.handle(StatesWatched(0, RUN, [(part, 100) for part in machine.parts])) == []
    assert kinds(machine.make_step()) == ["SendRecord", "SendStep", "SendStep"]


def test_a_partition_that_is_cut_anew_keeps_its_old_copy_until_there_is_a_new_one() -> None:
    machine = Machine()
    machine.follow()
    machine.gradients = machine._gradients(2)
    whole = OwnedPart(machine.gradients, 0, 0, 64, 3, owner=0, is_own=True, first=0)
    assert "SendEnd" not in kinds(machine.core.handle(StatesWatched(0, RUN, [(whole, 200)])))
    machine.parts = [whole]
    assert kinds(machine.make_step()) == ["SendRecord", "SendStates"]


def test_a_new_generation_that_another_server_adds_keeps_its_copy_until_there_is_one_there() -> None:
    machine = Machine(*GPU, 3, 4, adds=(3, 3))
    machine.follow()
    machine.gradients = machine._gradients(2)
    machine.parts = machine._parts(machine.gradients, (4, 3))
    assert machine.core.handle(StatesWatched(0, RUN, [(part, 100) for part in machine.parts])) == []
    second = machine.make_step()
    assert "SendEnd" not in kinds(second)
    machine.hold(second)
    third = machine.make_step(durable=2)
    assert [(each.server, each.part.index) for each in third if isinstance(each, SendEnd)] == [(3, 0)]


def test_states_that_are_given_up_are_forgotten_by_their_server() -> None:
    machine = Machine()
    machine.follow()
    machine.make_step()
    assert kinds(machine.core.handle(StatesEnded(machine.parts))).count("SendEnd") == 2
    assert kinds(machine.make_step()) == ["SendRecord"]


def test_a_new_run_begins_anew() -> None:
    machine = Machine()
    machine.follow()
    assert "SendEnd" in kinds(machine.core.handle(StatesWatched(0, RUN + 1, [(part, 100) for part in machine.parts])))
    assert kinds(machine.make_step()) == ["SendRecord", "SendStates", "SendStates"]


def test_states_that_were_copied_for_a_server_that_is_gone_are_released() -> None:
    machine = Machine(*GPU, 3)
    machine.core.handle(StepBegun(0, 1, machine.parts))
    assert machine.core.handle(StepDue(machine.parts[0])) == [CopyStates()]
    machine.core.handle(TopologyChanged(topology(*GPU, 4, epoch=2)))
    made = StepMade(StepNumbers(1, 0), 10, 2, ())
    assert released(machine.core.handle(PartitionStepped(machine.parts[0], made, "states", None))) == ["states"]


def test_copies_keep_to_their_transitions() -> None:
    machine = Machine()
    machine.follow()
    copy = next(iter(machine.core._pieces.values())).copies[0]
    assert copy.state is CopyProgress.FOLLOWING
    with pytest.raises(IllegalTransitionError, match="partition 0 of 'g' at server 3"):
        copy.move_to(CopyProgress.SEEDING)


def test_a_sum_of_any_generation_goes_on_with_its_partition() -> None:
    """The tensor was declared again: its partition's owner knows the generation before, which is a part of its own."""
    older, newer = (Machine().parts[0] for _ in range(2))
    waiting, other = SumForOwner(newer, (100,)), SumForOwner(Machine().parts[1], (100,))
    ran: list[object] = []
    executor = object.__new__(Executor)
    executor._behind = {newer: waiting, other.part: other}
    executor.run = ran.extend  # type: ignore[method-assign]
    executor.catch_up(older)
    assert ran == [waiting]
    assert executor._behind == {other.part: other}
