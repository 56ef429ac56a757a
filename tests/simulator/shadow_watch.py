"""What must hold for the states that servers keep in step, at any moment: they are their owners', and one step can be
restored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from byteps_py.kernels.update_rules import Scalar
from byteps_py.server.shadow_state import HeldStep, OwnerMessage, PartFacts, StatesCopy
from byteps_py.shadow import Restorable, RestorableRecord, ServerDescription, latest_step
from byteps_py.shadow.restorable import _at, _MergedRun
from byteps_py.tensors import Op
from byteps_py.wire.data_link import Kind
from byteps_py.worker.core.shadow_copies import CopyProgress, PartitionStepped, SendStep, ServerLacks
from byteps_py.worker.core.shadowing import Shadowing
from byteps_py.worker.core.topology import Topology

from .codecs import decoded, from_floats
from .memory import Memory, Wide, combine, update, wide_values
from .services import Server, Worker
from .shadow_rank import ShadowRank, attachment
from .shadow_uses import ShadowProgram
from .world import InvariantError

if TYPE_CHECKING:
    from .cluster import Cluster

_MOST_WAITING = 4  # steps of a copy, where nothing is disturbed
_MOST_SUMS = 2


@dataclass(slots=True)
class _Tracked:
    """A partition. ``servers``: those whose copy follows, by address. ``is_safe``: a step can be restored whatever
    happens to its owner, until a server is lost. ``is_doubled``: after the loss of any server, too. ``unfollowed``:
    steps made since nothing follows."""

    name: str
    count: int
    servers: frozenset[str] = frozenset()
    is_safe: bool = False
    is_doubled: bool = False
    lacks: int = 0
    unfollowed: int = 0
    last: int = 0


class ShadowWatch:
    """Of one cluster."""

    def __init__(self, cluster: Cluster, program: ShadowProgram, copies: int) -> None:
        self._cluster = cluster
        self._program = program
        self._copies = copies
        self._memory: Memory = cluster.memory
        self._parts: dict[tuple[int, int], _Tracked] = {}
        self._known: dict[int, set[str]] = {}  # servers, by worker
        self._topologies: dict[Worker, Topology] = {}
        self._gone: set[str] = set()  # servers
        self._spared: set[str] = set()  # those of them whose loss has cost nothing, as all they had was doubled
        self._lost_step = 0  # the last one that had begun when a server was lost
        self._changed_step = 0  # the same, when one was lost or came
        self._lacks: dict[tuple[int, int], int] = {}
        self.credit_bytes = 0  # of owners, if it is limited
        self.is_due = False  # something has happened after which all must be as it should
        self._agreed = 0
        self.restored = 0  # the last step that could be

    @property
    def _holders(self) -> list[Server]:
        """Servers whose copies a restarted job would find."""
        return [s for s in self._cluster.servers if s.is_alive or (s.has_stopped and not s.is_leaving)]

    @property
    def _is_quiet(self) -> bool:
        world = self._cluster.world
        return not (world.trials or world.faults or world.outages) and math.isinf(self._memory.most_waiting_bytes)

    @property
    def _ranks(self) -> list[ShadowRank]:
        return [rank for rank in self._cluster.ranks if isinstance(rank, ShadowRank)]

    @property
    def _begun(self) -> int:
        return max((rank.begun for rank in self._ranks), default=0)

    def _lose(self, gone: set[str]) -> None:
        """Servers, with what they held."""
        for tracked in self._parts.values():
            tracked.unfollowed = 0
        if gone and gone <= self._spared:
            return
        if len(gone) == 1 and self._is_doubled:
            self._spared |= gone
        else:
            self._lost_step = self._begun
        self._changed_step = self._begun
        for tracked in self._parts.values():
            tracked.is_doubled = False

    def has_two_copies(self) -> bool:
        """The loss of a server would lose no step, as things are."""
        self._look()
        return self._is_doubled

    @property
    def _is_doubled(self) -> bool:
        """All states, and the durable step's records, are at two servers."""
        durable = self._durable
        return (
            self._copies > 1
            and math.isinf(self._memory.most_waiting_bytes)
            and durable > self._changed_step
            and self._is_whole(durable)
            and all(tracked.is_doubled for tracked in self._parts.values())
            and all(core.servers.copies > 1 for worker in self._cluster.workers if (core := _core(worker)) is not None)
        )

    # ---- owners ------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """After each event."""
        gone = {server.address for server in self._cluster.servers} - {server.address for server in self._holders}
        if gone - self._gone:
            self._lose(gone - self._gone)
        self._gone = gone
        if (agreed := max((rank.durable for rank in self._ranks), default=0)) != self._agreed:
            self._agreed, self.is_due = agreed, True
        for server in self._cluster.servers:
            store = _store(server)
            if "handle" not in vars(store):
                store.handle = functools.partial(self._handle, store.handle)
        for worker in self._cluster.workers:
            if worker.is_alive:
                self._watch(worker)

    def _handle(self, handle: Callable[[Any, float], list[Any]], event: Any, now: float) -> list[Any]:
        actions = handle(event, now)
        self.is_due |= isinstance(event, OwnerMessage) and event.header.kind is Kind.SHADOW_END
        return actions

    def _watch(self, worker: Worker) -> None:
        core = _core(worker)
        if core is None:
            return
        topology = worker._service._group._epoch  # type: ignore[union-attr]
        if topology is not self._topologies.get(worker):
            self._topologies[worker] = topology
            now = {server.address for server in topology.servers}
            known = self._known.setdefault(worker.machine, set())
            if known - now:
                self._lose(known - now)
            if now - known:
                self._changed_step = self._begun
            self._known[worker.machine] = now
        if not core.servers.members:  # nobody holds what its ranks have
            self._lose(set())
            for rank in self._ranks:
                rank.may_hang = rank.may_hang or rank.machine == worker.machine
        if "handle" in vars(core):
            return
        core._credit_bytes = self.credit_bytes or core._credit_bytes
        handle = core.handle

        def note(event: Any) -> Any:
            if isinstance(event, ServerLacks):
                self._note(core, event)
            actions = handle(event)
            if isinstance(event, PartitionStepped):
                place = event.part.tensor.key, event.part.index
                if place in core._pieces and (tracked := self._parts.get(place)) is not None:
                    tracked.unfollowed += 1
            return actions

        core.handle = note  # type: ignore[method-assign]

    def _note(self, core: Shadowing[Any], said: ServerLacks) -> None:
        """A server lacks something."""
        if core.awaits_record(said.server, said.place, said.step):
            # Without memory for it, the last step may not be held.
            for rank in self._ranks:
                rank.may_hang = rank.may_hang or rank.number == said.place[1]
            return
        self._lacks[said.place] = self._lacks.get(said.place, 0) + 1
        if self._is_quiet and not self._program.joins:  # after a join, tensors are of other generations
            raise InvariantError(f"server {said.server} lacks something of {said.place} before step {said.step}")

    def _look(self) -> None:
        """At the owners, as things are."""
        holders = {server.address for server in self._holders}
        for worker in self._cluster.workers:
            core = _core(worker)
            if worker.is_alive and core is not None:
                servers = _servers(worker)
                network = worker._service._group.network  # type: ignore[union-attr]
                is_reached = network is not None and all(network._links[each].is_open for each in core.servers.members)
                for place, piece in core._pieces.items():
                    self._look_at(core, place, piece, servers, holders & {*servers.values()}, is_reached)
        for tracked in self._parts.values():
            tracked.is_safe = tracked.is_safe and bool(tracked.servers & holders)
            tracked.is_doubled = tracked.is_doubled and len(tracked.servers & holders) > 1

    def _look_at(
        self,
        core: Shadowing[Any],
        place: tuple[int, int],
        piece: Any,
        servers: dict[int, str],
        now: set[str],
        is_reached: bool,
    ) -> None:
        tracked = self._parts.setdefault(place, _Tracked(piece.part.tensor.name, piece.part.count))
        following = [copy for copy in piece.copies if copy.state is CopyProgress.FOLLOWING]
        lacks = self._lacks.get(place, 0)
        if following:
            tracked.servers = frozenset(servers[copy.server] for copy in following if copy.server in servers)
            tracked.unfollowed = 0
            durable = self._durable
            tracked.is_safe = tracked.is_safe or any(_has(core, copy, durable) for copy in following)
            tracked.is_doubled = sum(_has(core, copy, durable) for copy in following) > 1
        elif tracked.lacks != lacks or not tracked.servers & now:
            tracked.is_safe = False
        tracked.lacks = lacks
        if piece.sums > 1 and piece.part.tensor.is_alone:
            sent = [each for queue in core._unacknowledged.values() for each in queue if isinstance(each, SendStep)]
            steps = {each.step for each in sent if each.copy.part is piece and each.held is not None}
            if len(steps) > 1:
                raise InvariantError(f"{piece} has the sums of {len(steps)} steps on their way")
        if not is_reached:
            tracked.unfollowed = 0
        limit = 6 + (len(core._pieces) if self.credit_bytes else 0) + (1 << min(lacks + 1, 5) if lacks else 0)
        if tracked.unfollowed > limit and core.servers.members and self._is_at_rest:
            raise InvariantError(f"{piece} does not follow after {tracked.unfollowed} steps")

    @property
    def _is_at_rest(self) -> bool:
        """No server is frozen, or can't be reached."""
        cluster = self._cluster
        return not cluster.world.outages and all(not s.is_paused for s in cluster.servers if s.is_alive)

    # ---- servers -----------------------------------------------------------------------------------------------

    @property
    def _durable(self) -> int:
        """The last step that somebody takes for durable."""
        runs = [run.durable for server in self._holders for run in _store(server)._runs.values()]
        return max((*runs, *(rank.durable for rank in self._ranks)), default=0)

    def check(self) -> None:
        """All invariants."""
        self.is_due = False
        self._look()
        for server in self._holders:
            self._check_records(server)
            for run in _store(server)._runs.values():
                for part in run.parts.values():
                    if len(part.sums) > _MOST_SUMS:
                        raise InvariantError(f"{server.name} keeps {len(part.sums)} sums of {part.facts}")
                    for copy in part.copies:
                        self._check_copy(server, copy, run.durable)
        self._check_restorable()

    @staticmethod
    def _check_records(server: Server) -> None:
        """What waits is counted once, and of a record that is needed no more nothing waits."""
        store = _store(server)
        waiting = records = 0
        for run in store._runs.values():
            records += run.records.nbytes
            for copy in (copy for part in run.parts.values() for copy in (part.kept, part.latest) if copy is not None):
                waiting += sum(step.total.nbytes for step in copy.steps)
            for record in run.records:
                if not record.is_held and record.step < run.records.newest_held(record.rank, run.durable):
                    raise InvariantError(f"{server.name} keeps a part of rank {record.rank}'s step {record.step}")
        counted = (store.waiting_bytes, store.record_bytes)
        if counted != (waiting, records):
            raise InvariantError(f"{server.name} counts {counted} bytes of sums and records, of {(waiting, records)}")

    def _check_copy(self, server: Server, copy: StatesCopy, durable: int) -> None:
        facts = copy.facts
        beyond = sum(step.number > durable for step in copy.steps)
        if self._is_quiet and beyond > _MOST_WAITING:
            raise InvariantError(f"{server.name} has {beyond} steps of {facts} that are not durable")
        if copy.base > max(copy.seeded, durable):
            raise InvariantError(f"{server.name} has applied step {copy.base} of {facts}, durable is {durable}")
        self._compare(server, copy, copy.base, range(facts.first, facts.first + facts.count))

    def _compare(self, server: Server, copy: StatesCopy, step: int, elements: range) -> None:
        facts = copy.facts
        whole = self._program.history.get(facts.name, {}).get(step)
        if whole is None:
            raise InvariantError(f"{server.name} has {facts} as of step {step}, which is none")
        found = self._states(server, copy, step)
        for number, (state, due) in enumerate(zip(found, whole, strict=True)):
            wanted = np.frombuffer(due, state.dtype)[elements.start : elements.stop]
            if state[elements.start - facts.first : elements.stop - facts.first].tobytes() != wanted.tobytes():
                raise InvariantError(f"{server.name} has another state {number} of {facts} as of step {step}")

    def _states(self, server: Server, copy: StatesCopy, step: int) -> list[Wide]:
        """As they can be read."""
        facts, keeper = copy.facts, server._service.shadows
        wide = np.float64 if facts.kind.state_itemsize == 8 else np.float32
        states = [
            np.frombuffer(copy.memory.bytes_of(number, 0, facts.state_nbytes), wide).copy()
            for number in range(facts.kind.states)
        ]
        due: list[HeldStep] = []
        due += [action.step for action in keeper._waiting if action.copy is copy]
        if copy in keeper._under_way:
            under_way, outcome = keeper._under_way[copy]
            due += [] if outcome else [under_way]
        for held in (*due, *(held for held in copy.steps if held.number <= step)):
            self._apply(states, facts, held)
        return states

    def _apply(self, states: list[Wide], facts: PartFacts, held: HeldStep) -> None:
        total: Any = held.total
        data = self._memory.at(total.address, facts.sum_nbytes)
        if facts.codec is not None:
            data = from_floats(facts.kind.gradient, decoded(data)[: facts.count])
        gradient = wide_values(facts.kind, combine(Op.SUM, facts.kind.gradient, [data], held.divisor))
        for segment in held.segments:
            at = slice(segment.elements.start, segment.elements.stop)
            if segment.scalars[Scalar.PHASE]:
                states[0][at] += states[-1][at] * gradient.dtype.type(segment.scalars[Scalar.STEP])
            else:
                update([state[at] for state in states], gradient[at], segment.scalars)

    # ---- a restarted job ---------------------------------------------------------------------------------------

    def _check_restorable(self) -> None:
        now = self._cluster.world.now_s
        by_address = {server.address: server for server in self._holders}
        said = [ServerDescription(address, _store(s).describe(now)) for address, s in by_address.items()]
        found = latest_step(said)
        durable = self._durable
        if isinstance(found, Restorable):
            self.restored = found.step
            for record in found.records.values():
                self._compare_attached(by_address[record.server], record)
            for name, parts in found.tensors.items():
                for part in parts:
                    if part.step != self._program.last(name, found.step):
                        raise InvariantError(f"step {found.step} would be restored with step {part.step} of {name}")
                    store = _store(by_address[part.server])
                    copies = store._runs[part.run].parts[part.key, part.index].copies
                    copy = next(copy for copy in copies if copy.delivers(part.step))
                    self._compare(by_address[part.server], copy, part.step, part.elements)
        if not self._is_whole(durable) or durable <= self._lost_step:
            return
        if not isinstance(found, Restorable) or found.step < durable:
            what = f"step {found.step}" if isinstance(found, Restorable) else f"nothing ({self._reasons(said)})"
            raise InvariantError(f"{what} can be restored, though step {durable} is durable")

    @staticmethod
    def _compare_attached(server: Server, record: RestorableRecord) -> None:
        places = range(record.attached_bytes)
        found = server._service.shadows.attached(record.run, record.rank, record.step, places)
        if found != attachment(record.rank, record.step):
            raise InvariantError(
                f"{server.name} has something else than rank {record.rank} has attached to step {record.step}"
            )

    @staticmethod
    def _reasons(said: list[ServerDescription]) -> str:
        """Why no step can be restored."""
        merged = _MergedRun(0)
        for each in said:
            for run in each.description.runs:
                merged.add(each.address, run)
        return "; ".join(str(_at(merged, step)) for step in sorted(merged.records, reverse=True))

    def _is_whole(self, durable: int) -> bool:
        """All partitions of all models that have stepped are safe."""
        counts: dict[str, int] = {}
        for tracked in self._parts.values():
            counts[tracked.name] = counts.get(tracked.name, 0) + (tracked.count if tracked.is_safe else 0)
        models = [model for model in self._program.models if self._program.last(model.name, durable)]
        return bool(models) and all(counts.get(model.name, 0) == model.gradients.count for model in models)


def _store(server: Server) -> Any:
    return server._service.shadows.store


def _core(worker: Worker) -> Shadowing[Any] | None:
    group = worker._service._group
    return group.requests.hosting.shadows._core if group is not None else None


def _has(core: Shadowing[Any], copy: Any, durable: int) -> bool:
    """A server has said that its copy has all steps up to a durable one."""
    sent = [each.step for each in core._unacknowledged.get(copy.server, ()) if core._counts(each, copy)]
    return copy.seed <= durable < min(sent, default=durable + 1)


def _servers(worker: Worker) -> dict[int, str]:
    """Addresses, by member id."""
    group = worker._service._group
    return {server.member_id: server.address for server in group._epoch.servers} if group is not None else {}
