"""Partitions with owners: who owns which, and steps in the middle of rounds, in the communication service's core."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.worker_core import block, slot, tensor

from byteps_py.errors import ProtocolError, UsageError
from byteps_py.placement.hosted_shares import HostedOptimum
from byteps_py.placement.shares import Optimum
from byteps_py.proto import control_pb2 as pb
from byteps_py.tensors import DType, Op, TensorSpec, key_of
from byteps_py.wire.chunks import CHUNK_BYTES
from byteps_py.worker.core import IllegalTransitionError
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.events import (
    Answered,
    BytesReady,
    Computed,
    Push,
    Release,
    ResultWanted,
    RoundDone,
    StepArmed,
    StepEnded,
    StepSkipped,
    SumsAwaited,
    Supply,
    TensorAgreed,
    TensorVoid,
)
from byteps_py.worker.core.hosted_steps import (
    STEP_STATES,
    AllSummed,
    Forget,
    HostedSteps,
    MakeStep,
    OwnedPart,
    StepState,
    SumForOwner,
)
from byteps_py.worker.core.owners import NOBODY, OwnedPiece, Owners, machine_that_copies
from byteps_py.worker.core.placement_view import PlacementView, replicated_gain
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.tensor import Compute, RankSlot, Stage, Tensor
from byteps_py.worker.core.topology import Topology

GRADIENTS = TensorSpec("g", DType.FLOAT32, (8,), average=True, ownership="g")
PARAMETERS = TensorSpec("g.parameters", DType.FLOAT32, (8,), Op.BROADCAST, ownership="g")
#: Machine 0 has ranks 0 and 1, machine 1 has rank 2. Two partitions of 4 elements.
SERVERS, OWNERS = (7, 8), (1, 2)


class Machine:
    """The core of machine 0 with both tensors agreed; ``machines``: 1 if it is alone."""

    def __init__(self, machines: int = 2, owners: tuple[int, ...] = OWNERS, is_shadowed: bool = False) -> None:
        machine_of = (0, 0, 1) if machines == 2 else (0, 0)
        self.steps = HostedSteps(0, 2, machine_of)
        self.pipeline = RoundPipeline(len(machine_of), PushQueue(), hosted=self.steps)
        self.gradients = self._agreed(replace(GRADIENTS, is_shadowed=is_shadowed), machines)
        self.parameters = self._agreed(PARAMETERS, machines)
        for each in (self.gradients, self.parameters):
            pieces = [OwnedPiece(16 * i, 16, SERVERS[i], owner, i) for i, owner in enumerate(owners)]
            assert self.pipeline.handle(TensorAgreed(each, pieces), 0.0) == []

    @staticmethod
    def _agreed(spec: TensorSpec, machines: int) -> Tensor:
        made = tensor([slot(0, spec), slot(1, spec)], contributions=machines == 2)
        made.machines = machines
        return made

    def part(self, index: int, of: Tensor | None = None) -> OwnedPart:
        part = (of or self.gradients).parts[index]
        assert isinstance(part, OwnedPart)
        return part

    def slot(self, local_rank: int) -> RankSlot:
        return self.gradients.slots[local_rank]

    def ready(self, of: Tensor) -> list[object]:
        found: list[object] = []
        for each in of.slots:
            found += self.pipeline.handle(BytesReady(each, each.round + 1, of.spec.nbytes), 0.0)
        return found

    def push_gradients(self) -> None:
        """The local ranks' gradients are there, and are added and pushed."""
        computes = self.ready(self.gradients)
        pushed: list[object] = []
        for compute in computes:
            assert isinstance(compute, Compute)
            pushed += self.pipeline.handle(Computed(compute.part), 0.0)
        assert [(a.part.index, a.round) for a in pushed if isinstance(a, Push)] == [(0, 1), (1, 1)]


def only(actions: list[object], kind: type) -> list[object]:
    return [action for action in actions if isinstance(action, kind)]


# ---- steps -------------------------------------------------------------------------------------------------------


def test_a_sum_is_stepped_once_it_is_there_and_its_owner_has_said_how() -> None:
    machine = Machine()
    machine.push_gradients()
    own, other = machine.part(0), machine.part(1)
    assert (own.is_acknowledged, own.wants_result, own.contributes) == (False, True, True)
    assert (other.is_acknowledged, other.wants_result, other.contributes) == (True, False, True)
    assert machine.pipeline.handle(Answered(own, 1, 5_000), 0.0) == []  # no rank has stepped yet
    assert own.state is StepState.SUMMED
    assert machine.pipeline.handle(Answered(own, 1, 6_000), 0.0) == []  # again, from elsewhere: it changes nothing
    (step,) = machine.pipeline.handle(StepArmed(machine.slot(1), 1), 0.0)
    assert isinstance(step, MakeStep)
    assert (step.part, step.inputs, step.divisor) == (own, (5_000,), 3)
    assert step.targets == [machine.part(0, machine.parameters)]
    assert machine.pipeline.handle(StepArmed(machine.slot(1), 1), 0.0) == []  # said again
    assert machine.pipeline.handle(Answered(own, 1, 5_000), 0.0) == []
    assert machine.pipeline.handle(StepEnded(step), 0.0) == []  # the other partition has not been taken yet
    assert machine.pipeline.handle(Answered(other, 1, 0), 0.0) == [
        RoundDone(machine.gradients, tuple((s.local_rank, s.id, 1) for s in machine.gradients.slots))
    ]


def test_an_owner_may_say_how_before_the_sum_is_there() -> None:
    machine = Machine()
    machine.push_gradients()
    assert machine.pipeline.handle(StepArmed(machine.slot(1), 1), 0.0) == []
    (step,) = machine.pipeline.handle(Answered(machine.part(0), 1, 5_000), 0.0)
    assert isinstance(step, MakeStep)
    assert step.inputs == (5_000,)


def test_parameters_are_sent_once_stepped_and_pulled_where_they_are_not_owned() -> None:
    machine = Machine()
    machine.push_gradients()
    machine.pipeline.handle(StepArmed(machine.slot(1), 1), 0.0)
    own, other = machine.part(0, machine.parameters), machine.part(1, machine.parameters)
    assert (own.root_machine, own.contributes, own.wants_result) == (0, True, False)
    assert (other.root_machine, other.contributes, other.wants_result) == (1, False, True)
    assert machine.ready(machine.parameters) == []  # no sum is at its owner yet
    assert machine.pipeline.handle(Answered(machine.part(1), 1, 0), 0.0) == [Push(other, 1)]
    (step,) = machine.pipeline.handle(Answered(machine.part(0), 1, 5_000), 0.0)
    assert isinstance(step, MakeStep)
    assert [a.part for a in machine.pipeline.handle(StepEnded(step), 0.0) if isinstance(a, Push)] == [own]
    assert own.contribution == (block(200_000), 0)  # of odd rounds
    assert machine.pipeline.handle(ResultWanted(own, 1, 8), 0.0) == []  # sent again by itself, until it is taken
    assert machine.pipeline.handle(Answered(own, 1, 0), 0.0) == []
    assert machine.pipeline.handle(ResultWanted(own, 1, 8), 0.0) == [Supply(own, 1, 8)]
    assert own.given(1) == (block(200_000), 0)
    assert other.given(1) is None
    (delivery,) = machine.pipeline.handle(Answered(other, 1, 7_000), 0.0)
    assert isinstance(delivery, Compute)
    assert (delivery.inputs, delivery.outputs) == ((7_000,), (10_016, 20_016))
    (done,) = machine.pipeline.handle(Computed(other), 0.0)
    assert isinstance(done, RoundDone)


def test_alone_the_step_adds_the_ranks_gradients() -> None:
    machine = Machine(machines=1, owners=(0, 1))
    assert machine.ready(machine.gradients) == []
    (first,) = machine.pipeline.handle(StepArmed(machine.slot(0), 1), 0.0)
    assert isinstance(first, MakeStep)
    assert (first.inputs, first.divisor) == ((10_000, 20_000), 2)
    assert machine.ready(machine.parameters) == []
    assert machine.pipeline.handle(StepEnded(first), 0.0) == []
    (second,) = machine.pipeline.handle(StepArmed(machine.slot(1), 1), 0.0)
    assert isinstance(second, MakeStep)
    assert second.inputs == (10_016, 20_016)
    done = machine.pipeline.handle(StepEnded(second), 0.0)
    assert [a.tensor for a in done if isinstance(a, RoundDone)] == [machine.parameters, machine.gradients]
    assert (machine.gradients.running, machine.parameters.running) == (0, 0)


def test_alone_shadowed_gradients_are_added_before_the_step() -> None:
    machine = Machine(machines=1, owners=(0, 1), is_shadowed=True)
    sums = machine.ready(machine.gradients)
    assert sums == [SumForOwner(machine.part(i), (10_000 + 16 * i, 20_000 + 16 * i)) for i in (0, 1)]
    assert machine.pipeline.handle(StepArmed(machine.slot(0), 1), 0.0) == []
    machine.part(0).answer = block(7_000)
    (step,) = machine.pipeline.handle(Computed(machine.part(0)), 0.0)
    assert isinstance(step, MakeStep)
    assert (step.inputs, step.divisor) == ((7_000,), 2)
    assert machine.gradients.is_used
    machine.pipeline.handle(TensorVoid(machine.gradients), 0.0)
    assert machine.pipeline.handle(Computed(machine.part(1)), 0.0) == []
    assert machine.gradients.is_used
    assert machine.pipeline.handle(StepEnded(step), 0.0) == [Release(machine.gradients.slots, machine.gradients)]


def test_alone_parameters_may_be_asked_for_after_all_steps() -> None:
    machine = Machine(machines=1, owners=(0, 1))
    machine.ready(machine.gradients)
    for local_rank in (0, 1):
        (step,) = machine.pipeline.handle(StepArmed(machine.slot(local_rank), 1), 0.0)
        assert isinstance(step, MakeStep)
        machine.pipeline.handle(StepEnded(step), 0.0)
    assert [a.tensor for a in machine.ready(machine.parameters) if isinstance(a, RoundDone)] == [machine.parameters]


def test_a_sum_may_be_given_up_before_or_after_it_is_there() -> None:
    machine = Machine()
    machine.push_gradients()
    assert machine.pipeline.handle(Answered(machine.part(0), 1, 5_000), 0.0) == []
    assert machine.pipeline.handle(StepSkipped(machine.slot(1), 1), 0.0) == [Forget(machine.part(0))]
    with pytest.raises(ProtocolError, match="steps in round 1"):
        machine.pipeline.handle(StepArmed(machine.slot(1), 1), 0.0)
    assert only(machine.pipeline.handle(Answered(machine.part(1), 1, 0), 0.0), RoundDone)
    machine.ready(machine.gradients)
    for part in machine.gradients.parts:
        machine.pipeline.handle(Computed(part), 0.0)
    assert machine.pipeline.handle(StepSkipped(machine.slot(1), 2), 0.0) == []
    assert machine.pipeline.handle(Answered(machine.part(0), 2, 5_000), 0.0) == [Forget(machine.part(0))]


def test_a_rank_may_wait_for_its_sums() -> None:
    machine = Machine()
    assert machine.pipeline.handle(SumsAwaited(machine.slot(0)), 0.0) == [AllSummed(machine.slot(0))]  # it owns nothing
    machine.push_gradients()
    assert machine.pipeline.handle(SumsAwaited(machine.slot(1)), 0.0) == []
    assert machine.pipeline.handle(Answered(machine.part(0), 1, 5_000), 0.0) == [AllSummed(machine.slot(1))]
    assert machine.part(0).inputs == (5_000,)


def test_a_round_may_have_two_steps() -> None:
    """As LAMB's has. Nobody else hears of the first one."""
    machine = Machine()
    machine.push_gradients()
    machine.ready(machine.parameters)
    assert machine.pipeline.handle(StepArmed(machine.slot(1), 1, is_last=False), 0.0) == []
    assert machine.pipeline.handle(SumsAwaited(machine.slot(1)), 0.0) == []
    (first,) = machine.pipeline.handle(Answered(machine.part(0), 1, 5_000), 0.0)
    assert isinstance(first, MakeStep)
    with pytest.raises(ProtocolError, match="local rank 1 steps in round 1"):  # the first one is not made yet
        machine.pipeline.handle(StepArmed(machine.slot(1), 1), 0.0)
    assert machine.pipeline.handle(StepEnded(first), 0.0) == [AllSummed(machine.slot(1))]
    (second,) = machine.pipeline.handle(StepArmed(machine.slot(1), 1), 0.0)
    assert isinstance(second, MakeStep)
    assert (first.inputs, first.is_last) == ((5_000,), False)
    assert (second.inputs, second.is_last) == ((5_000,), True)
    assert only(machine.pipeline.handle(StepEnded(second), 0.0), Push)
    assert machine.pipeline.handle(StepArmed(machine.slot(1), 1), 0.0) == []


@pytest.mark.parametrize("is_last", [True, False])
def test_a_step_ends_though_its_parameters_are_void_meanwhile(is_last: bool) -> None:
    """Ranks have joined, which gave the sum but not that. The round of gradients is one that all took part in."""
    machine = Machine()
    machine.push_gradients()
    machine.pipeline.handle(StepArmed(machine.slot(1), 1, is_last), 0.0)
    (step,) = machine.pipeline.handle(Answered(machine.part(0), 1, 5_000), 0.0)
    assert isinstance(step, MakeStep)
    machine.pipeline.handle(Answered(machine.part(1), 1, 0), 0.0)
    machine.pipeline.handle(SumsAwaited(machine.slot(1)), 0.0)
    assert machine.pipeline.handle(TensorVoid(machine.parameters), 0.0) == []
    actions = machine.pipeline.handle(StepEnded(step), 0.0)
    assert isinstance(actions[0], Release)
    assert [type(action) for action in actions[1:]] == [RoundDone if is_last else AllSummed]


@pytest.mark.parametrize("round_", [0, 2])
def test_a_step_of_another_round_is_refused(round_: int) -> None:
    machine = Machine()
    machine.push_gradients()
    with pytest.raises(ProtocolError, match=f"local rank 1 steps in round {round_}"):
        machine.pipeline.handle(StepArmed(machine.slot(1), round_), 0.0)
    with pytest.raises(ProtocolError, match=f"local rank 1 gives up round {round_}"):
        machine.pipeline.handle(StepSkipped(machine.slot(1), round_), 0.0)


def test_a_void_tensor_gives_held_sums_back() -> None:
    machine = Machine()
    machine.push_gradients()
    machine.pipeline.handle(Answered(machine.part(0), 1, 5_000), 0.0)
    assert Forget(machine.part(0)) in machine.pipeline.handle(TensorVoid(machine.gradients), 0.0)


@pytest.mark.parametrize("state", list(StepState))
def test_states_of_steps(state: StepState) -> None:
    after = {"SUMMING": "SUMMED", "SUMMED": "STEPPING SUMMING", "STEPPING": "SUMMING SUMMED"}[state.name].split()
    assert {each.name for each in STEP_STATES[state]} == set(after)
    for other in StepState:
        part = Machine().part(0)
        part.state = state
        if other.name in after:
            part.step_to(other)
        else:
            with pytest.raises(IllegalTransitionError, match=f"is {state.name} .*: {other.name} can't follow"):
                part.step_to(other)
    assert Machine().part(0).stage is Stage.WAITING


# ---- owners ------------------------------------------------------------------------------------------------------


def topology(machines: int = 3, local_size: int = 2, servers: tuple[str, ...] = ("m0", "m1", "m2", "c0")) -> Topology:
    workers = [
        pb.Member(machine_index=i, machine_id=f"m{i}", first_rank=i * local_size, local_size=local_size)
        for i in range(machines)
    ]
    summing = [pb.Member(member_id=10 + i, machine_id=name, weight=1) for i, name in enumerate(servers)]
    return Topology(1, 0, tuple(workers), tuple(summing), 64, 1)


def owned(owners: Owners, spec: TensorSpec, servers: list[int]) -> list[int]:
    owners.add(spec, [(4 * i, 4, server) for i, server in enumerate(servers)])
    return [piece.owner for piece in owners.pieces(spec, 64)]


def owned_pieces(placing: PlacementView, spec: TensorSpec) -> list[OwnedPiece]:
    return [piece for piece in placing.pieces(spec) if isinstance(piece, OwnedPiece)]


def test_a_sum_stays_on_the_machine_that_takes_it() -> None:
    """Ranks of a machine take turns; what a CPU machine adds goes to the machine that owns the least."""
    spec = TensorSpec("g", DType.FLOAT32, (7,), ownership="g")
    assert owned(Owners(topology()), spec, [10, 10, 12, 13, 13, 13, 11]) == [0, 1, 4, 2, 3, 5, 2]


@pytest.mark.parametrize("machine", [0, 2])
def test_each_machine_owns_all_of_a_replicated_sum(machine: int) -> None:
    """Its ranks take turns, whatever the servers are; a sum with one owner does not see it."""
    spec = TensorSpec("g", DType.FLOAT32, (5,), ownership="g", is_replicated=True)
    owners = Owners(replace(topology(), machine_index=machine))
    first = 2 * machine
    assert owned(owners, spec, [10, 10, 12, 13, 11]) == [first, first + 1, first, first + 1, first]
    parameters = TensorSpec("p", DType.FLOAT32, (5,), Op.BROADCAST, ownership="g", is_replicated=True)
    assert {piece.owner for piece in owners.pieces(parameters, 64)} == {first, first + 1}
    other = TensorSpec("h", DType.FLOAT32, (3,), ownership="h")
    assert owned(owners, other, [10, 12, 13]) == [0, 4, 2]


def test_owners_are_ranks_of_the_group() -> None:
    """A partition stays on the machine that takes it only if the machine has such ranks."""
    spec = TensorSpec("g", DType.FLOAT32, (6,), ownership="g", group=(1, 2, 3))
    owners = Owners(topology())
    assert owned(owners, spec, [10, 11, 11, 12, 13, 13]) == [1, 2, 3, 1, 1, 2]
    other = replace(spec, name="h", ownership="h", group=(4, 5))  # of one machine, without a server
    assert owned(owners, other, [-1] * 3) == [4, 5, 4]
    everybody = replace(spec, name="i", ownership="i", group=())
    assert owned(owners, everybody, [10]) == [0]  # which owns nothing yet


def test_machines_divide_a_group_s_replicated_sum_alike() -> None:
    """By the places of their ranks in the group; a machine without one enters the tensor, too."""
    spec = TensorSpec("g", DType.FLOAT32, (4,), ownership="g", is_replicated=True, group=(0, 1, 3))
    found = [owned(Owners(replace(topology(), machine_index=machine)), spec, [10, 11, 12, 13]) for machine in range(3)]
    assert found == [[0] * 4, [3] * 4, [NOBODY] * 4]
    spec = replace(spec, group=(0, 1, 2, 3))
    owners = [Owners(replace(topology(), machine_index=machine)) for machine in range(3)]
    assert [owned(each, spec, [10, 11, 12]) for each in owners] == [[0, 1, 0], [2, 3, 2], [NOBODY] * 3]
    again = replace(spec, name="h", ownership="h")
    assert [owned(each, again, [10]) for each in owners] == [[1], [3], [NOBODY]]
    for each in owners:  # with other owners, and back
        owned(each, replace(spec, group=()), [10, 11])
    assert [owned(each, spec, [10, 11, 12]) for each in owners] == [[0, 0, 1], [2, 2, 3], [NOBODY] * 3]


def test_machines_take_turns_to_copy_replicated_states() -> None:
    """Within a tensor, and where each tensor has one partition only."""
    assert {machine_that_copies(7, index, [0, 1, 3]) for index in range(3)} == {0, 1, 3}
    of_small = [machine_that_copies(key_of(f"layers.{i}"), 0, [0, 1]) for i in range(100)]
    assert 30 <= sum(of_small) <= 70


def test_a_sum_that_is_declared_otherwise_gets_other_owners() -> None:
    one = TensorSpec("g", DType.FLOAT32, (2,), ownership="g")
    owners = Owners(replace(topology(), machine_index=1))
    assert owned(owners, one, [10, 12]) == [0, 4]
    assert owned(owners, replace(one, is_replicated=True), [10, 12]) == [2, 3]
    assert owned(owners, one, [10, 12]) == [0, 4]


def test_ranks_that_other_machines_do_not_have_own_nothing_of_replicated_sums() -> None:
    members = [
        pb.Member(machine_index=i, machine_id=f"m{i}", first_rank=first, local_size=size)
        for i, (first, size) in enumerate([(0, 2), (2, 3)])
    ]
    owners = Owners(replace(topology(), workers=tuple(members), machine_index=1))
    assert owned(owners, TensorSpec("g", DType.FLOAT32, (3,), ownership="g", is_replicated=True), [10] * 3) == [2, 3, 2]


def test_replicated_sums_are_placed_by_the_formula_and_parameters_stay() -> None:
    """As a sum without owners is."""
    around = topology(2, 1, ("m0", "m1", "c0"))
    placing = PlacementView(around, 1 << 20, CHUNK_BYTES)
    sums = TensorSpec("g", DType.FLOAT32, (512,), ownership="g", is_replicated=True)
    plain = PlacementView(around, 1 << 20, CHUNK_BYTES)
    placing.add([sums])
    plain.add([replace(sums, ownership="", is_replicated=False)])
    cut = [piece[:3] for piece in placing.pieces(sums)]
    assert cut == [tuple(piece)[:3] for piece in plain.pieces(replace(sums, ownership="", is_replicated=False))]
    parameters = TensorSpec("p", DType.FLOAT32, (512,), Op.BROADCAST, ownership="g", is_replicated=True)
    assert (around.machines_in(sums), around.machines_in(parameters)) == (0, 1)
    assert [piece[:2] for piece in placing.pieces(parameters)] == [piece[:2] for piece in cut]


def job_of(n: int, k: int) -> Topology:
    """``n`` GPU machines, ``k`` CPU machines, with the placement's weights."""
    best = Optimum(n, k)
    names = [f"c{i}" for i in range(k)] + [f"m{i}" for i in range(n if k < n else 0)]
    servers = [
        pb.Member(
            member_id=i,
            machine_id=name,
            weight=weight,
            kind=pb.MACHINE_KIND_CPU if name[0] == "c" else pb.MACHINE_KIND_GPU,
        )
        for i, (name, weight) in enumerate(zip(names, best.server_weights if n > 1 else [1] * len(names), strict=False))
    ]
    return replace(topology(n, 1, ()), servers=tuple(servers))


@pytest.mark.parametrize(
    ("n", "k", "gain"), [(1, 1, 1.0), (2, 0, 1.0), (2, 1, 1.0), (4, 0, 1.0), (4, 2, 1.136), (4, 4, 1.25)]
)
def test_what_states_on_each_machine_gain(n: int, k: int, gain: float) -> None:
    assert replicated_gain(job_of(n, k)) == pytest.approx(gain, abs=0.001)


@pytest.mark.parametrize(
    ("n", "k", "gain"), [(2, 0, 1.2), (2, 1, 1.0), (4, 0, 1.067), (4, 1, 1.0), (4, 2, 1.071), (4, 4, 1.25)]
)
def test_what_they_gain_with_a_shadow(n: int, k: int, gain: float) -> None:
    sharded, machine = (HostedOptimum(n, k, each, is_shadowed=True).time for each in (True, False))
    found = replicated_gain(job_of(n, k), is_shadowed=True)
    assert found == pytest.approx(max(1.0, float(sharded / machine)), abs=0.001)
    assert found == pytest.approx(gain, abs=0.001)


def test_only_what_has_owners_is_replicated() -> None:
    with pytest.raises(UsageError, match="owners on each machine need ownership, not a sum of"):
        TensorSpec("g", DType.FLOAT32, (2,), is_replicated=True)


def test_owners_stay_when_a_name_is_declared_again_or_its_servers_change() -> None:
    spec = TensorSpec("g", DType.FLOAT32, (3,), ownership="g")
    owners = Owners(topology())
    before = owned(owners, spec, [10, 11, 12])
    assert owned(owners, spec, [12, 12, 12]) == before
    assert [piece.server for piece in owners.pieces(spec, 64)] == [12, 12, 12]
    other = replace(spec, name="h", shape=(1,), ownership="h")
    assert owned(owners, other, [10]) == [1]  # the other rank of machine 0


def test_parameters_have_the_owners_of_their_gradients_and_may_be_cut_smaller() -> None:
    spec = TensorSpec("g", DType.FLOAT16, (8,), ownership="g")
    owners = Owners(topology())
    owners.add(spec, [(0, 8, 10), (8, 8, 11)])
    wide = TensorSpec("p", DType.FLOAT32, (8,), Op.BROADCAST, ownership="g")
    assert owners.pieces(wide, 8) == [
        OwnedPiece(offset, 8, server, owner, source)
        for offset, server, owner, source in ((0, 10, 0, 0), (8, 10, 0, 0), (16, 11, 2, 1), (24, 11, 2, 1))
    ]


def test_parameters_go_to_the_servers_that_add_their_gradients_by_now() -> None:
    """Servers may come and go between the two verdicts."""
    before = topology(2, 1, ("m0", "m1"))
    placing = PlacementView(before, 1 << 20, CHUNK_BYTES)
    gradients = TensorSpec("g", DType.FLOAT32, (64,), ownership="g")
    placing.add([gradients])
    assert {piece[2] for piece in placing.pieces(gradients)} == {10, 11}
    owners = [OwnedPiece(*piece).owner for piece in placing.pieces(gradients)]
    placing.change(replace(before, epoch=2, servers=before.servers[1:]))
    for spec in (gradients, replace(gradients, name="p", op=Op.BROADCAST)):
        pieces = [OwnedPiece(*piece) for piece in placing.pieces(spec)]
        assert {piece.server for piece in pieces} == {11}
        assert [piece.owner for piece in pieces] == owners


def test_parameters_without_their_gradients_are_refused() -> None:
    owners = Owners(topology())
    with pytest.raises(ProtocolError, match="'p' has 8 elements with the owners of 'g', which is not agreed"):
        owners.pieces(TensorSpec("p", DType.FLOAT32, (8,), Op.BROADCAST, ownership="g"), 64)
    owned(owners, TensorSpec("g", DType.FLOAT32, (7,), ownership="g"), [10] * 7)
    with pytest.raises(ProtocolError, match="which has 7 elements of ranks all"):
        owners.pieces(TensorSpec("p", DType.FLOAT32, (8,), Op.BROADCAST, ownership="g"), 64)
    with pytest.raises(ProtocolError, match="which has 7 elements of ranks all"):
        owners.pieces(TensorSpec("p", DType.FLOAT32, (7,), Op.BROADCAST, ownership="g", group=(0, 2)), 64)


@pytest.mark.parametrize(("n", "k"), [(2, 0), (2, 1), (2, 2), (3, 1), (4, 2), (4, 3), (8, 4), (8, 8)])
@pytest.mark.parametrize("shadow", [False, True])
def test_links_carry_what_the_optimum_for_owned_sums_says(n: int, k: int, shadow: bool) -> None:
    """No link carries more than the formula says, up to a few partitions."""
    best, count, nbytes = Optimum(n, k), 4096, 64
    kinds = [pb.MACHINE_KIND_CPU] * k + [pb.MACHINE_KIND_GPU] * (n if n > k else 0)
    names = [f"c{i}" for i in range(k)] + [f"m{i}" for i in range(n if n > k else 0)]
    members = [
        pb.Member(member_id=i, machine_id=name, weight=weight, kind=kind)
        for i, (name, kind, weight) in enumerate(zip(names, kinds, best.server_weights, strict=True))
    ]
    around = replace(topology(n, 1, ()), servers=tuple(members), partition_bytes=nbytes)
    placing = PlacementView(around, 1 << 20, CHUNK_BYTES)
    spec = TensorSpec("g", DType.FLOAT32, (count * nbytes // 4,), ownership="g", is_shadowed=shadow)
    placing.add([spec])
    taken: dict[str, int] = {}  # partitions by machine that adds them
    owned: dict[str, int] = {}  # of CPU machines, by owner
    for piece in placing.pieces(spec):
        assert isinstance(piece, OwnedPiece)
        name = names[piece.server]
        taken[name] = taken.get(name, 0) + 1
        if name.startswith("c"):
            owned[f"m{piece.owner}"] = owned.get(f"m{piece.owner}", 0) + 1
        else:
            assert name == f"m{piece.owner}"
    cpu = [(n + 1) * taken.get(f"c{i}", 0) for i in range(k)]
    gpu = [count + (n - 2) * taken.get(f"m{i}", 0) + owned.get(f"m{i}", 0) for i in range(n)]
    if shadow and k:
        sent = sum(taken.get(f"m{i}", 0) for i in range(n))
        cpu = [carried + sent // k for carried in cpu]
        gpu = [carried + taken.get(f"m{i}", 0) for i, carried in enumerate(gpu)]
    optimum = HostedOptimum(n, k, is_sharded=True, is_shadowed=shadow and k > 0)
    assert max(*cpu, *gpu) / count == pytest.approx(float(optimum.time), rel=0.04)


def test_parameters_go_to_the_servers_that_have_their_sums_now() -> None:
    around = topology(2, 1, ("m0", "m1", "c0"))
    placing = PlacementView(around, 1 << 20, CHUNK_BYTES)
    sums = TensorSpec("g", DType.FLOAT32, (64,), ownership="g")
    parameters = TensorSpec("p", DType.FLOAT32, (64,), Op.BROADCAST, ownership="g")
    placing.add([sums])
    before = [piece.owner for piece in owned_pieces(placing, sums)]
    placing.change(replace(around, servers=around.servers[:2]))
    servers = [piece.server for piece in owned_pieces(placing, parameters)]
    assert servers == [piece.server for piece in owned_pieces(placing, sums)]
    assert set(servers) == {10, 11}
    assert [piece.owner for piece in owned_pieces(placing, parameters)] == before  # the owners stay


@pytest.mark.parametrize(
    ("op", "changed"),
    [
        (Op.MAX, {}),
        (Op.SUM, {"ownership": "another"}),
        (Op.SUM, {"scatters": True}),
        (Op.BROADCAST, {"ownership": "g"}),
    ],
)
def test_what_can_have_owners(op: Op, changed: dict[str, object]) -> None:
    fields: dict[str, object] = {
        "name": "g",
        "dtype": DType.FLOAT32,
        "shape": (4,),
        "op": op,
        "ownership": "g",
        **changed,
    }
    with pytest.raises(UsageError, match="ownership needs a SUM"):
        TensorSpec(**fields)  # type: ignore[arg-type]
