"""States that a running summation server keeps in step, over real sockets: equal to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from support.data_plane import WAIT_S, Server, exact_sum, header_for, random_values
from support.shadow import RUN, ShadowedStates, held, lacks
from support.summation import SETTINGS

from byteps_py.errors import CommunicationError, PeerLostError
from byteps_py.kernels.update_rules import Decay, Method, StepKind, UpdateRule
from byteps_py.proto import control_pb2
from byteps_py.runtime import Runtime
from byteps_py.server.service import SummationService
from byteps_py.shadow import RestorablePartition, ShadowReader
from byteps_py.tensors import DType
from byteps_py.wire.data_link import (
    MAX_PIECES_BYTES,
    Header,
    Kind,
    SegmentNumbers,
    ShadowDescription,
    ShadowRecord,
    ShadowStep,
)

ADAMW = StepKind(UpdateRule(Method.ADAM, Decay.DECOUPLED), DType.BFLOAT16, DType.BFLOAT16)
SGD = StepKind(UpdateRule(Method.SGD, Decay.COUPLED, momentum=True), DType.FLOAT32, DType.FLOAT32)
LAMB = StepKind(UpdateRule(Method.LAMB, Decay.DECOUPLED), DType.FLOAT32, DType.FLOAT32)

pytestmark = pytest.mark.usefixtures("zeromq_collector")


class Shadows:
    """A running server with three machines, of which number 2 owns states."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.machines = [server.machine(i) for i in range(3)]
        self.owner = self.machines[2]
        self.reader = ShadowReader(SETTINGS, WAIT_S, servers=lambda: [server.service.address])

    def sum(self, states: ShadowedStates, round_: int) -> bytes:
        """Contributions of all machines; the server's sum, which is the owner's."""
        dtype = states.kind.gradient
        parts = [random_values(dtype, states.count, seed=100 * round_ + m) for m in range(3)]
        for machine, part in zip(self.machines, parts, strict=True):
            facts = {"dtype": dtype, "key": states.key, "index": states.index, "round": round_}
            machine.push(part.tobytes(), generation=states.generation, flags=4 * (machine is not self.owner), **facts)
        total = self.owner.result()
        for machine in self.machines[:2]:
            assert machine.result() == b""
        assert total == exact_sum(dtype, parts).tobytes()
        return total

    def describe(self, hold_s: float = 0.0) -> ShadowDescription:
        [found] = self.reader.describe(hold_s)
        assert not found.error
        return found.description

    def read(self, states: ShadowedStates, step: int, run: int = RUN) -> list[bytes] | str:
        """All states, or why they can't be read."""
        address, elements = self.server.service.address, range(states.count)
        part = RestorablePartition(address, run, states.key, states.index, states.kind, elements, 0, step)
        found = [bytearray(states.count * states.kind.state_itemsize) for _ in range(states.kind.states)]
        try:
            for number, state in enumerate(found):
                self.reader.read_into(part, number, elements, memoryview(state))
        except CommunicationError as error:
            return str(error).removeprefix(f"the server at {address}: ")
        return list(map(bytes, found))

    def assert_same(self, states: ShadowedStates) -> None:
        assert self.read(states, states.step) == [state.tobytes() for state in states.states]


@pytest.fixture(name="shadows")
def _shadows() -> Iterator[Shadows]:
    with Server(SETTINGS, num_machines=3, kind=control_pb2.MACHINE_KIND_CPU) as server:
        shadows = Shadows(server)
        with shadows.reader:
            yield shadows


@pytest.mark.parametrize("kind", [ADAMW, SGD], ids=["adamw bf16", "sgd f32"])
@pytest.mark.parametrize("count", [1001, 60_000])
def test_steps_with_the_server_s_own_sums_and_with_others_are_the_owner_s(
    shadows: Shadows, kind: StepKind, count: int
) -> None:
    own, foreign = ShadowedStates(kind, count), ShadowedStates(kind, count, index=1)
    for states in (own, foreign):
        states.begin(shadows.owner)
        assert held(shadows.owner) == 0
    for round_ in range(1, 7):
        total = shadows.sum(own, round_)
        own.make_step(shadows.owner, round_, total, durable=round_ - 2 if round_ > 2 else 0)
        assert held(shadows.owner) == round_
        total = random_values(kind.gradient, count, seed=round_).tobytes()
        foreign.give_sum(shadows.owner, round_, total)
        foreign.make_step(shadows.owner, round_, total)
        assert held(shadows.owner) == round_
    [run] = shadows.describe().runs
    assert (run.run, run.durable) == (RUN, 4)
    assert [held.partition.step + len(held.steps) for held in run.partitions] == [6, 6]
    for states in (own, foreign):
        shadows.assert_same(states)
    assert shadows.read(own, 3) == (
        f"elements 0 to {count} of 'gradients 7' can't be read as of step 3: it is at step 6"
    )


def test_a_step_before_the_last_can_be_read_while_steps_are_held_back(shadows: Shadows) -> None:
    states = ShadowedStates(SGD, 5000)
    states.begin(shadows.owner)
    [held(shadows.owner)]
    shadows.describe(hold_s=30.0)
    for round_ in range(1, 5):
        states.make_step(shadows.owner, round_, shadows.sum(states, round_), durable=round_)
        assert held(shadows.owner) == round_
        if round_ == 2:
            then = [state.tobytes() for state in states.states]
    [partition] = shadows.describe().runs[0].partitions
    assert (partition.partition.step, list(partition.steps)) == (0, [1, 2, 3, 4])
    assert shadows.read(states, 2) == then
    shadows.assert_same(states)


def test_states_are_sent_anew_after_a_sum_was_missing(shadows: Shadows) -> None:
    states = ShadowedStates(ADAMW, 5000)
    states.begin(shadows.owner)
    assert held(shadows.owner) == 0
    states.make_step(shadows.owner, 1, random_values(ADAMW.gradient, 5000, seed=1).tobytes())
    step, text = lacks(shadows.owner)
    assert (step, text) == (1, "step 1 of elements 0 to 5000 of 'gradients 7': the sum of round 1 is not here")
    states.begin(shadows.owner)
    assert held(shadows.owner) == 1
    states.make_step(shadows.owner, 1, shadows.sum(states, 1))
    assert held(shadows.owner) == 2
    shadows.assert_same(states)


def test_both_phases_of_lamb_are_made_with_one_sum(shadows: Shadows) -> None:
    from byteps_py.kernels.optimizer_steps import StepSegment, bind_segments
    from byteps_py.kernels.update_rules import Hyperparameters, apply_scalars, step_scalars

    count = 3000
    states = ShadowedStates(LAMB, count)
    states.begin(shadows.owner)
    assert held(shadows.owner) == 0
    total = shadows.sum(states, 1)
    scalars = step_scalars(LAMB.rule, Hyperparameters(lr=0.1, weight_decay=0.01), 1)
    segments = [StepSegment(range(count), scalars), StepSegment(range(count), apply_scalars(0.25))]
    sent = tuple(SegmentNumbers(each.elements.start, each.elements.stop, each.scalars) for each in segments)
    said = ShadowStep(run=RUN, step=1, before=0, divisor=3, segments=sent)
    shadows.owner.send(states.header(Kind.SHADOW_STEP, 2, 1), said.pack())
    assert held(shadows.owner) == 1
    before = [state.copy() for state in states.states]
    gradient, parameters = np.frombuffer(bytearray(total), np.float32), np.zeros(count, np.float32)
    addresses = [state.ctypes.data for state in states.states]
    bind_segments(LAMB, addresses, [gradient.ctypes.data], [parameters.ctypes.data], 3)(segments)
    states.step = 1
    assert all((old != new).any() for old, new in zip(before, states.states, strict=True))
    shadows.assert_same(states)


def test_a_step_without_segments_changes_nothing(shadows: Shadows) -> None:
    states = ShadowedStates(SGD, 500)
    states.begin(shadows.owner)
    assert held(shadows.owner) == 0
    states.give_sum(shadows.owner, 1, bytes(2000))
    said = ShadowStep(run=RUN, step=1, before=0, divisor=1, durable=1)
    shadows.owner.send(states.header(Kind.SHADOW_STEP, 2, 1), said.pack())
    assert held(shadows.owner) == 1
    states.step = 1
    shadows.assert_same(states)


def test_shadows_outlive_a_change_of_the_machines(shadows: Shadows) -> None:
    states = ShadowedStates(SGD, 500)
    states.begin(shadows.owner)
    assert held(shadows.owner) == 0
    shadows.server.set_members(2, epoch=2)
    shadows.server.set_members(3, epoch=3)
    shadows.assert_same(states)
    states.record(shadows.owner, durable=0)
    assert held(shadows.owner) == 0
    shadows.owner.send(states.header(Kind.SHADOW_END, 2, 0), b"")
    states.record(shadows.owner)
    assert held(shadows.owner) == 0
    [run] = shadows.describe().runs
    assert (len(run.partitions), len(run.records)) == (0, 1)


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        (Header(Kind.SHADOW_BEGIN, 2, epoch=1, key=7, round=0), b"\xff\xff"),
        (Header(Kind.SHADOW_BEGIN, 2, epoch=1, key=7, round=0), b""),
        (Header(Kind.SHADOW_RECORD, 2, epoch=1, key=7, round=0), ShadowRecord(8, 0, 0, 1).pack()),
        (Header(Kind.SHADOW_HELD, 2, epoch=1, key=7, round=0), b""),
        (Header(Kind.SHADOW_RECORD, 2, epoch=1, key=7, offset=4, segment_offset=7), b"four"),
        (Header(Kind.SHADOW_RECORD, 2, epoch=1, key=7, offset=4, segment_offset=8), b""),
        (Header(Kind.SHADOW_RECORD, 2, epoch=1, key=7, segment_offset=MAX_PIECES_BYTES + 1), b"four"),
        (Header(Kind.SHADOW_RECORD, 2, epoch=1, key=7, segment_offset=3), b"four"),
    ],
)
def test_what_no_owner_says_is_refused_and_harms_nobody(shadows: Shadows, header: Header, payload: bytes) -> None:
    shadows.owner.send(header, payload)
    assert shadows.owner.refusal().startswith("ProtocolError\n")
    states = ShadowedStates(SGD, 500)
    states.begin(shadows.owner)
    assert held(shadows.owner) == 0
    shadows.assert_same(states)


def test_a_long_record_comes_in_pieces(shadows: Shadows) -> None:
    common = bytes(range(256)) * 100
    said = ShadowRecord(run=RUN, step=3, rank=0, size=1, common=common).pack()
    size = 10_000
    header = Header(Kind.SHADOW_RECORD, 2, epoch=1, key=RUN, index=0, round=3, segment_offset=len(said))
    starts = [*range(0, len(said), size)]
    for start in (*starts[1:], starts[1], starts[0]):
        shadows.owner.send(dataclasses.replace(header, offset=start), said[start : start + size])
    assert held(shadows.owner) == 3
    [run] = shadows.describe().runs
    assert [record.common for record in run.records] == [common]


def test_a_local_machine_must_not_send_states() -> None:
    with Server(SETTINGS) as server:
        local = server.local_machine(0)
        local.channel.send(header_for(0, b"", Kind.SHADOW_END).pack())
        with pytest.raises(PeerLostError):
            local.channel.receive(WAIT_S)


def test_a_local_machine_s_sum_is_not_kept() -> None:
    """It lies in that machine's memory."""
    with Server(SETTINGS) as server:
        local, remote = server.local_machine(0), server.machine(1)
        local.give_segment()
        states = ShadowedStates(SGD, 2000)
        states.begin(remote)
        assert held(remote) == 0
        local.write(0, bytes(8000))
        local.send(bytes(8000), answer_offset=64 << 10)
        remote.push(bytes(8000), flags=4)
        assert remote.result() == b""
        states.make_step(remote, 1, bytes(8000))
        assert "the sum of round 1 is not here" in lacks(remote)[1]


class _Poor(SummationService):
    """It has 100 kB beside its reserve."""

    def __init__(self, settings: object, kind: object, connect: object, runtime: Runtime) -> None:
        poor = dataclasses.replace(runtime, available_memory=lambda: float((256 << 20) + 100_000))
        super().__init__(settings, kind, connect, poor)  # type: ignore[arg-type]


def test_without_memory_the_owner_hears_how_much_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    with Server(SETTINGS, num_machines=1, kind=control_pb2.MACHINE_KIND_CPU, service_class=_Poor) as server:
        machine = server.machine(0)
        for index in range(3):
            ShadowedStates(SGD, 65536, index=index).begin(machine)
            said = f"for the states of elements {index * 65536} to {(index + 1) * 65536} of 'gradients 7'"
            assert lacks(machine) == (0, f"no memory {said}: they take 524352 bytes, and 100000 are left")
        ShadowedStates(SGD, 500, index=3).begin(machine)
        assert held(machine) == 0
    assert len([record for record in caplog.records if "logged once" in record.message]) == 1
