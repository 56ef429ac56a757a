"""The accumulators of a summation server: each change counts once, and is in no copy before that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from byteps_py.errors import ProtocolError
from byteps_py.server.admission import objection
from byteps_py.server.round_state import (
    WANT_AFTER_S,
    WANT_AGAIN_S,
    Accumulator,
    Action,
    Contribution,
    Load,
    Merge,
    RefuseContributions,
    SendCopy,
    Want,
    Waves,
)
from byteps_py.server.rounds import Rounds
from byteps_py.tensor_codec import Codec, CodecKind
from byteps_py.tensors import NO_BOUND, DType, Op
from byteps_py.wire.data_link import CODED, NO_RESULT, RESENT, SUPPLY, Header, Kind

ORIGINS = [f"connection of machine {machine}" for machine in range(4)]
Actions = list[Action[Contribution]]
#: A machine and its round, whose change a copy contains.
Change = tuple[int, int]


def given(machine: int, round_: int, **facts: object) -> Contribution:
    values = {"epoch": 1, "key": 7, "generation": 1, "length": 64, "staleness": 2, **facts}
    origin = values.pop("origin", ORIGINS[machine])
    kind = values.pop("kind", Kind.PUSH)
    header = Header(kind, machine, dtype=DType.FLOAT32, op=Op.ACCUMULATE, round=round_, **values)  # type: ignore[arg-type]
    return Contribution(header, origin, 0 if kind is Kind.PASS else header.payload_nbytes)


class Server:
    """A server whose kernels run at once, unless they are ``held``. ``copies``: what it has sent, as (machine, its
    round, the changes in it). A copy that is loaded has the changes that its sender's clock says."""

    def __init__(self, machines: int, epoch: int = 1) -> None:
        self.rounds: Rounds[Contribution] = Rounds(4096)
        self.rounds.membership(epoch, machines, now=0.0)
        self.copies: list[tuple[int, int, list[Change]]] = []
        self.wanted: list[tuple[bool, tuple[int, ...]]] = []  # (a whole copy, of machines)
        self.refused: list[tuple[int, str]] = []
        self.clocks: list[tuple[int, ...]] = []
        self.brought: list[list[Change] | None] = []  # the changes that were sent instead of values
        self.held: list[Load[Contribution] | Merge[Contribution]] | None = None
        self.now = 0.0

    @property
    def kept(self) -> Accumulator[Contribution]:
        (found,) = self.rounds.accumulators._all()
        return found

    def gives(
        self, machine: int, round_: int, now: float = 0.0, **facts: object
    ) -> list[tuple[int, int, list[Change]]]:
        """Returns the copies that are sent then."""
        before = len(self.copies)
        self.perform(self.rounds.contribution(given(machine, round_, **facts), now))
        return self.copies[before:]

    def says(self, machine: int, clock: tuple[int, ...], epoch: int = 1) -> None:
        header = given(machine, clock[machine], kind=Kind.CLOCK, epoch=epoch).header
        self.perform(self.rounds.accumulators.clock(header, clock, 0.0))

    def tick(self, now: float) -> None:
        self.perform(self.rounds.tick(now))

    def perform(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case Load() | Merge():
                    if self.held is not None:
                        self.held.append(action)
                    else:
                        self.finish(action)
                case SendCopy(contribution, clock, _, changes):
                    values = self.kept.values
                    assert isinstance(values, list)
                    self.brought.append(changes and [(each.header.sender, each.header.round) for each in changes])
                    self.clocks.append(clock)
                    self.copies.append((contribution.header.sender, contribution.header.round, sorted(values)))
                case Want(header, machines):
                    self.wanted.append((header.is_supply, machines))
                case RefuseContributions(contributions, _, text):
                    self.refused += [(contribution.header.sender, text) for contribution in contributions]
                case _:
                    raise AssertionError(action)

    def finish(self, action: Load[Contribution] | Merge[Contribution], error: BaseException | None = None) -> None:
        """A kernel has run."""
        header = action.contribution.header
        if isinstance(action, Load):
            clock = action.accumulator.clocks.get(header.sender, ())
            values = [(machine, round_) for machine, last in enumerate(clock) for round_ in range(2, last + 1)]
            self.perform(self.rounds.accumulators.loaded(action.accumulator, values, error, self.now))
            return
        if action.adds:
            assert isinstance(action.accumulator.values, list)
            action.accumulator.values.append((header.sender, header.round))
        self.perform(self.rounds.accumulators.merged(action, error, self.now))


def started(machines: int = 2) -> Server:
    """All machines have the first value."""
    server = Server(machines)
    for machine in range(machines):
        server.gives(machine, 1)
    server.copies.clear()
    server.clocks.clear()
    return server


def changes(*each: Iterable[Change]) -> list[Change]:
    return sorted(change for some in each for change in some)


def test_the_first_round_brings_the_value_once_all_machines_are_there() -> None:
    server = Server(2)
    assert server.gives(0, 1) == []
    assert server.gives(1, 1) == [(0, 1, []), (1, 1, [])]
    assert server.wanted == []
    assert server.clocks == [(1, 0), (1, 1)]


def test_a_copy_has_all_changes_that_have_come() -> None:
    server = started()
    assert server.gives(0, 2) == [(0, 2, [(0, 2)])]
    assert server.gives(0, 3) == [(0, 3, [(0, 2), (0, 3)])]
    assert server.gives(1, 2) == [(1, 2, [(0, 2), (0, 3), (1, 2)])]
    assert server.clocks == [(2, 1), (3, 1), (3, 2)]


def test_a_machine_waits_for_the_slowest_and_its_change_is_there_for_it() -> None:
    server = started()
    server.gives(0, 2)
    server.gives(0, 3)
    assert server.gives(0, 4, now=1.0) == []
    (stall,) = server.rounds.stalled(3.0, 1.0)
    assert (stall.round, stall.age_s, stall.missing) == (4, 2.0, (1,))
    everything = [(0, 2), (0, 3), (0, 4), (1, 2)]
    assert server.gives(1, 2) == [(1, 2, everything), (0, 4, everything)]
    assert server.rounds.counters.bytes_in_flight == 0


def test_nobody_waits_for_machines_whose_ranks_have_joined() -> None:
    server = started()
    server.gives(0, 2)
    server.gives(0, 3)
    assert server.gives(0, 4) == []
    assert server.gives(1, 2, kind=Kind.PASS) == [(0, 4, [(0, 2), (0, 3), (0, 4)])]
    assert len(server.gives(0, 5)) == 1
    assert server.gives(1, 1) == []  # a late repetition says nothing new
    assert len(server.gives(0, 6)) == 1


def test_what_is_given_again_on_a_new_connection_is_answered_and_not_added() -> None:
    server = started()
    assert server.gives(0, 2) == [(0, 2, [(0, 2)])]
    assert server.gives(0, 2) == []  # the network repeats it
    assert server.gives(0, 2, flags=RESENT, origin="the next one") == [(0, 2, [(0, 2)])]
    assert server.rounds.counters.duplicates == 1


def test_what_waits_is_answered_on_the_connection_that_came_last() -> None:
    server = started()
    for round_ in (2, 3, 4):
        server.gives(0, round_)
    server.rounds.on_origin_lost(ORIGINS[0])
    assert server.rounds.counters.bytes_in_flight == 0
    assert server.gives(0, 4, flags=RESENT, origin="the next one") == []
    assert [copy[:2] for copy in server.gives(1, 2)] == [(1, 2), (0, 4)]


def test_a_connection_that_ends_under_a_kernel_is_not_answered_and_its_change_counts() -> None:
    server = started()
    server.held = []
    server.gives(0, 2)
    server.rounds.on_origin_lost(ORIGINS[0])
    (merge,), server.held = server.held, None
    server.finish(merge)
    assert server.copies == []
    assert server.gives(0, 2, flags=RESENT, origin="the next one") == [(0, 2, [(0, 2)])]


def test_another_server_gathers_clocks_and_loads_the_newest_copy() -> None:
    """Machine 0's third change was in an answer that machine 1 has got, and machine 0 has not."""
    server = Server(3, epoch=2)
    server.gives(0, 3, epoch=2, flags=RESENT)
    server.tick(WANT_AFTER_S / 2)
    assert server.wanted == []
    server.tick(WANT_AFTER_S)
    assert server.wanted == [(False, (0, 1, 2))]
    server.says(0, (2, 1, 2), epoch=2)
    server.says(1, (3, 2, 2), epoch=2)
    server.tick(2 * WANT_AGAIN_S)
    assert server.wanted[1:] == [(False, (2,))]
    server.says(2, (2, 1, 2), epoch=2)
    assert server.wanted[2:] == [(True, (1,))]
    assert server.gives(2, 2, epoch=2, flags=RESENT | SUPPLY) == []  # it was not asked
    loaded = [(0, 2), (0, 3), (1, 2), (2, 2)]
    assert server.gives(1, 2, epoch=2, flags=RESENT | SUPPLY) == [(0, 3, loaded)]
    assert server.gives(2, 3, epoch=2) == [(2, 3, [*loaded, (2, 3)])]
    assert not server.rounds.is_wanting


def test_in_a_new_epoch_a_server_goes_on_with_its_own_values_if_they_have_everything() -> None:
    server = started()
    server.gives(0, 2)
    server.rounds.membership(2, 2, now=0.0)
    server.gives(1, 2, epoch=2, flags=RESENT)
    server.says(0, (2, 1), epoch=2)
    server.says(1, (1, 1), epoch=2)
    assert server.wanted == []
    assert server.copies[-1] == (1, 2, [(0, 2), (1, 2)])


def test_in_a_new_epoch_a_server_drops_values_that_others_have_gone_beyond() -> None:
    """Another server had the partition meanwhile."""
    server = started()
    server.gives(0, 2)
    server.rounds.membership(3, 2, now=0.0)
    server.gives(0, 4, epoch=3, flags=RESENT)
    server.says(0, (3, 1), epoch=3)
    server.says(1, (3, 2), epoch=3)
    assert server.wanted == [(True, (1,))]
    assert server.gives(1, 2, epoch=3, flags=RESENT | SUPPLY) == [(0, 4, [(0, 2), (0, 3), (0, 4), (1, 2)])]


def test_a_new_epoch_waits_for_the_kernel_that_is_at_work() -> None:
    server = started()
    server.held = []
    server.gives(0, 2)
    server.rounds.membership(2, 2, now=0.0)
    server.gives(0, 2, epoch=2, flags=RESENT)
    server.says(0, (1, 1), epoch=2)
    server.says(1, (1, 1), epoch=2)
    (merge,), server.held = server.held, None
    server.finish(merge)
    assert server.copies == [(0, 2, [(0, 2)])]  # in the values by then, and not added once more


def test_messages_of_an_epoch_that_is_over_are_ignored() -> None:
    server = started()
    server.rounds.membership(2, 2, now=0.0)
    server.gives(0, 2, epoch=2)
    assert server.gives(1, 2) == []
    server.says(1, (1, 1), epoch=1)
    assert 1 not in server.kept.clocks
    assert 1 not in server.kept.given
    assert server.refused == []


def test_a_server_that_loses_a_partition_releases_its_values() -> None:
    server = started()
    server.gives(0, 2)
    server.rounds.withdraw(given(0, 3, epoch=1, flags=NO_RESULT, kind=Kind.WITHDRAW).header)
    assert server.kept.values  # late: of this epoch
    server.rounds.withdraw(given(0, 3, epoch=2, kind=Kind.WITHDRAW).header)
    assert server.kept.values  # it is only taken back, to be given again
    server.rounds.withdraw(given(0, 3, epoch=2, flags=NO_RESULT, kind=Kind.WITHDRAW).header)
    assert list(server.rounds.accumulators._all()) == []


@pytest.mark.parametrize("has_share", [True, False])
def test_values_end_with_the_group_of_machines_and_with_the_servers_share(has_share: bool) -> None:
    server = started()
    server.rounds.membership(2, 2 + has_share, now=0.0, has_share=has_share)
    assert list(server.rounds.accumulators._all()) == []
    assert server.rounds.admission_limit.objection(8) == ""


def test_a_newer_generation_begins_with_its_own_first_value() -> None:
    server = started()
    server.gives(0, 2)
    server.gives(0, 1, generation=2)
    assert server.gives(1, 1, generation=2) == [(0, 1, []), (1, 1, [])]
    assert server.gives(0, 3) == []  # of the generation before


def test_a_replay_adds_and_answers_in_the_order_of_before() -> None:
    """Machine 1's change came first then, and machine 0 waited for its copy until machine 1's next change was there."""
    server = Server(2)
    order = server.rounds.accumulators.order
    for machine, round_, added_at, answered_at in (
        (0, 1, 1, 1),
        (1, 1, 2, 2),
        (0, 2, 4, 5),
        (1, 2, 3, 3),
        (1, 3, 5, 5),
    ):
        order(given(machine, round_, kind=Kind.ORDER).header, added_at, answered_at)
    server.gives(1, 1)
    assert server.gives(0, 1) == [(0, 1, []), (1, 1, [])]
    assert server.gives(0, 2) == []
    assert server.gives(1, 2) == [(1, 2, [(1, 2)])]
    everything = [(0, 2), (1, 2), (1, 3)]
    assert server.gives(1, 3) == [(1, 3, everything), (0, 2, everything)]
    server.gives(0, 3)
    assert "machine 0's contribution to round 3 came without its order" in server.refused[0][1]


def test_a_replay_makes_the_copy_before_the_next_change() -> None:
    server = Server(2)
    orders = {(0, 1): (1, 2), (1, 1): (2, 3), (0, 2): (3, 3)}
    for (machine, round_), versions in orders.items():
        server.rounds.accumulators.order(given(machine, round_, kind=Kind.ORDER).header, *versions)
    server.gives(1, 1)
    assert server.gives(0, 1) == [(0, 1, [])]
    assert server.gives(0, 2) == [(0, 2, [(0, 2)]), (1, 1, [(0, 2)])]


def test_what_machines_say_must_agree() -> None:
    server = started()
    server.gives(0, 2, length=32)
    ((machine, text),) = server.refused
    assert machine == 0
    assert "machines disagree about length" in text


def test_a_round_that_is_left_out_is_refused() -> None:
    server = started()
    server.gives(0, 3)
    assert server.refused == [
        (0, "partition 0 of tensor key 0x0000000000000007: machine 0 gives to round 3, but its last one was round 1")
    ]


def test_copies_that_contradict_each_other_are_refused() -> None:
    server = Server(2, epoch=2)
    server.gives(0, 3, epoch=2, flags=RESENT)
    server.says(0, (2, 1), epoch=2)
    server.says(1, (1, 2), epoch=2)
    ((machine, text),) = server.refused
    assert machine == 0
    assert "no machine's copy has all that the others' have: machine 0 [2, 1]; machine 1 [1, 2]" in text
    server.gives(1, 3, epoch=2)
    assert [machine for machine, _ in server.refused] == [0, 1]


def test_a_clock_of_other_machines_is_an_error() -> None:
    server = Server(2, epoch=2)
    server.gives(0, 3, epoch=2, flags=RESENT)
    with pytest.raises(ProtocolError, match=r"has the rounds \[2, 1, 1\] of 2 machines"):
        server.says(0, (2, 1, 1), epoch=2)


def test_a_kernel_that_fails_ends_the_partition() -> None:
    server = started()
    server.held = []
    server.gives(0, 2)
    (merge,), server.held = server.held, None
    server.finish(merge, MemoryError("none is left"))
    server.gives(1, 2)
    assert [machine for machine, _ in server.refused] == [0, 1]
    assert "none is left" in server.refused[1][1]


@pytest.mark.parametrize("facts", [{"staleness": 0}, {"machines": 2}])
def test_a_header_of_no_accumulate_is_refused(facts: dict[str, object]) -> None:
    server = Server(3)
    server.gives(0, 1, **facts)
    assert "an accumulate is for all machines and has a staleness" in server.refused[0][1]


# ---- a quorum -----------------------------------------------------------------------------------------------------


def of_quorum(server: Server, machine: int, round_: int, now: float) -> list[tuple[int, int]]:
    """Gives, and returns whose rounds are answered then."""
    before = len(server.copies)
    server.now = now
    server.gives(machine, round_, now, staleness=NO_BOUND, quorum=3)
    return [(machine, round_) for machine, round_, _ in server.copies[before:]]


def with_quorum(machines: int = 4) -> Server:
    """All machines have come 0, 1, 2 and 3 ms after the first, in two waves: the window has its least size."""
    server = Server(machines)
    for machine in range(machines):
        of_quorum(server, machine, 1, 0.0)
    for round_ in (2, 3):
        for machine in range(machines):
            of_quorum(server, machine, round_, round_ + machine / 1000)
    server.copies.clear()
    return server


def test_a_wave_ends_when_all_are_there_and_all_get_the_same() -> None:
    server = with_quorum()
    for machine in (2, 0, 1):
        assert of_quorum(server, machine, 4, 10.0) == []
    assert of_quorum(server, 3, 4, 10.01) == [(2, 4), (0, 4), (1, 4), (3, 4)]
    assert len({str(held) for _, _, held in server.copies}) == 1


def test_a_wave_with_a_quorum_does_not_wait_for_who_comes_too_late() -> None:
    server = with_quorum()
    for machine in range(3):
        assert of_quorum(server, machine, 4, 10.0) == []
    server.tick(10.049)
    assert server.copies == []
    assert server.rounds.is_wanting
    server.tick(10.051)
    assert [machine for machine, _, _ in server.copies] == [0, 1, 2]
    assert not server.rounds.is_wanting
    assert of_quorum(server, 3, 4, 10.5) == [(3, 4)]  # late: at once, and the change counts
    assert server.copies[-1][2] == changes((m, r) for m in range(4) for r in range(2, 5))
    for machine in range(3):
        of_quorum(server, machine, 5, 11.0)
    assert of_quorum(server, 3, 5, 11.01) == [(0, 5), (1, 5), (2, 5), (3, 5)]  # in time again


def test_below_a_quorum_machines_wait_and_are_named() -> None:
    server = with_quorum()
    for machine in range(2):
        of_quorum(server, machine, 4, 10.0)
    server.tick(99.0)
    assert server.copies == []
    ((missing, _), (same, _)) = [(stall.missing, stall.round) for stall in server.rounds.stalled(99.0, 1.0)]
    assert missing == same == (2, 3)
    assert of_quorum(server, 2, 4, 99.0) == [(0, 4), (1, 4), (2, 4)]  # its window is long over


def test_machines_that_have_joined_are_not_waited_for() -> None:
    server = with_quorum()
    for machine in range(2):
        of_quorum(server, machine, 4, 10.0)
    for machine in (2, 3):
        server.gives(machine, 4, 10.0, kind=Kind.PASS, staleness=NO_BOUND, quorum=3)
    assert [machine for machine, _, _ in server.copies] == [0, 1]


def test_the_first_waves_wait_for_all_and_measure() -> None:
    server = Server(4)
    for machine in range(4):
        of_quorum(server, machine, 1, 0.0)
    for machine in range(3):
        of_quorum(server, machine, 2, 1.0)
    server.tick(500.0)
    server.copies.clear()
    assert len(of_quorum(server, 3, 2, 501.0)) == 4


def test_a_few_slow_machines_do_not_move_the_window_and_many_do() -> None:
    waves = Waves()
    waves._arrivals.extend([0.0, 0.1, 0.2, 5.0] * 4)
    assert waves.window_s(4) == pytest.approx(0.15 + 4 * 0.1)
    waves = Waves()
    waves._arrivals.extend([0.0, 0.1, 5.0, 5.0] * 4)
    assert waves.window_s(4) > 5.0


def test_a_new_epoch_begins_a_new_wave() -> None:
    """Machines that were waiting wait with the others."""
    server = with_quorum()
    of_quorum(server, 0, 4, 10.0)
    server.rounds.membership(2, 4, now=20.0)
    facts = {"epoch": 2, "staleness": NO_BOUND, "quorum": 3, "flags": RESENT}
    for machine in range(4):
        server.gives(machine, 4, 20.0, **facts)
        server.says(machine, (3, 3, 3, 3), epoch=2)
    assert [machine for machine, _, _ in server.copies] == [0, 1, 2, 3]
    assert len({str(held) for _, _, held in server.copies}) == 1


def test_a_copy_that_was_lost_on_its_way_does_not_wait_for_another_wave() -> None:
    """The others have gone on, perhaps to wait for this machine in another wave."""
    server = with_quorum()
    for machine in range(4):
        of_quorum(server, machine, 4, 10.0)
    server.copies.clear()
    again = {"staleness": NO_BOUND, "quorum": 3, "flags": RESENT}
    server.gives(2, 4, 11.0, origin="its next connection", **again)
    assert [copy[:2] for copy in server.copies] == [(2, 4)]
    server.rounds.membership(2, 4, now=12.0)  # and the server that has answered is lost
    server.copies.clear()
    for machine in range(4):
        server.gives(machine, 5 if machine < 3 else 4, 12.0, epoch=2, **again)
        server.says(machine, (4, 4, 4, 4) if machine < 3 else (3, 3, 3, 3), epoch=2)
    assert [copy[:2] for copy in server.copies] == [(3, 4)]
    server.tick(13.0)
    assert [copy[:2] for copy in server.copies[1:]] == [(0, 5), (1, 5), (2, 5)]


INT8 = Codec(CodecKind.INT8)
CODES = {"length": 2048, "codec": INT8.code, "staleness": NO_BOUND}  # 512 elements in 520 bytes


def of_codes(machines: int = 4) -> Server:
    """All machines have the first value."""
    server = Server(machines)
    for machine in range(machines):
        server.gives(machine, 1, **CODES)
    server.brought.clear()
    return server


def brought(server: Server, machine: int, round_: int, version: int, **facts: object) -> list[list[Change] | None]:
    """What the answers bring to a change of a machine that has the values of this version."""
    before = len(server.brought)
    server.gives(machine, round_, **{**CODES, "flags": CODED, "drawn": version, **facts})
    return server.brought[before:]


def test_a_machine_gets_the_changes_that_it_lacks_while_these_are_shorter_than_the_values() -> None:
    server = of_codes()
    assert brought(server, 0, 2, version=4) == [[(0, 2)]]  # its own, of which it has the code
    assert brought(server, 1, 2, version=4) == [[(0, 2), (1, 2)]]
    assert brought(server, 2, 2, version=0) == [None]  # it has not said what it has
    assert brought(server, 0, 3, version=5) == [[(1, 2), (2, 2), (0, 3)]]
    assert brought(server, 3, 2, version=4) == [None]  # four others' are longer than the values
    assert brought(server, 3, 3, version=9) == [[(3, 3)]]
    assert sorted(server.kept.values or []) == [(0, 2), (0, 3), (1, 2), (2, 2), (3, 2), (3, 3)]  # type: ignore[call-overload]


def test_a_machine_that_asks_again_gets_the_same_changes() -> None:
    server = of_codes()
    assert brought(server, 0, 2, version=4) == [[(0, 2)]]
    assert brought(server, 1, 2, version=4) == [[(0, 2), (1, 2)]]
    again = {"flags": CODED | RESENT, "origin": "its next connection"}
    assert brought(server, 0, 2, version=4, **again) == [[(0, 2), (1, 2)]]
    assert brought(server, 0, 2, version=7, **again) == [None]  # there is no such version


def test_changes_of_an_earlier_epoch_are_not_brought() -> None:
    """Another server may have added them in another order."""
    server = of_codes(2)
    assert brought(server, 0, 2, version=2) == [[(0, 2)]]
    server.rounds.membership(2, 2, now=1.0)
    for machine, clock in enumerate(((2, 1), (1, 1))):
        server.gives(machine, clock[machine] + 1, **{**CODES, "flags": CODED | RESENT, "epoch": 2})
        server.says(machine, clock, epoch=2)
    assert server.brought[-2:] == [None, None]
    assert brought(server, 1, 3, version=5, epoch=2) == [[(1, 3)]]


def test_what_can_not_be_the_code_of_a_change_is_refused() -> None:
    for facts, text in (
        ({"round": 1}, "its payload can't be the code of a change"),
        ({"codec": 0}, "its payload can't be the code of a change"),
        ({"codec": Codec.randomk(0.1).code}, "is not one of a sum on a server"),
        ({"dtype": DType.FLOAT16}, "is not one of a sum on a server"),
        ({}, "its header announces 520 bytes of payload, but 521 arrived"),
    ):
        said = replace(given(0, 2, **{**CODES, "flags": CODED}).header, **facts)  # type: ignore[arg-type]
        assert text in objection(said, 521, 4, 4096)
    assert objection(given(0, 2, **{**CODES, "flags": CODED}).header, 520, 4, 2048) == ""
