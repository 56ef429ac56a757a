"""The simulated service processes: the real services, with the world in place of their surroundings; and what
must hold for them after each event and at their end.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from byteps_py.config.settings import Settings
from byteps_py.errors import RendezvousError
from byteps_py.proto import control_pb2 as pb
from byteps_py.server.round_state import Action as ServerAction, Round, RoundState
from byteps_py.server.service import SummationService
from byteps_py.tensors import Op
from byteps_py.worker.core.events import Action, Answered, RoundDone, RoundEvent, StepEnded
from byteps_py.worker.core.hosted_steps import MakeStep, OwnedPart, StepState
from byteps_py.worker.core.pieces import Transfer
from byteps_py.worker.core.tensor import AskSum, Part, Stage, Tensor
from byteps_py.worker.service import CommunicationService

from .ledger import Ledger, Queue
from .memory import Memory
from .network import ServerNetwork
from .runtime import SimulatedRuntime
from .world import InvariantError, Process, World


class Worker(Process):
    """A communication service."""

    def __init__(self, world: World, memory: Memory, index: int, ledger: Ledger) -> None:
        super().__init__(world, f"worker {index}")
        self.machine = index
        self.host = f"machine {index}"
        self._memory = memory
        self._ledger = ledger
        self._service: CommunicationService
        self._given: dict[Tensor, tuple[int, bytes]] = {}  # where a completed round's contribution lies, and what

    def start(
        self, kind: type[CommunicationService], settings: Settings, connect: Any, runtime: SimulatedRuntime
    ) -> None:
        self._service = kind(settings, settings.elastic, connect, runtime)
        self._service.begin()

    @property
    def has_begun(self) -> bool:
        """It knows that the cluster is complete."""
        return self._service._group is not None

    @property
    def parts(self) -> dict[tuple[int, int, int], Part]:
        """By key, generation, index."""
        group = self._service._group
        return group.executor._parts if group is not None else {}

    @property
    def fetched(self) -> Container[int]:
        """Numbers of what it has asked other machines for and not got."""
        peers = self._service._peers
        return peers._fetched if peers is not None else ()

    def broke(self, error: Exception) -> None:
        """As ``Service.run`` does; but only a server that is gone from the start excuses it."""
        if not isinstance(error, RendezvousError) or not self.world.faults:
            raise error
        self._service._fail(error)
        self._finish()

    def check(self) -> None:
        if not self.is_alive:
            return
        if self._service._loop.stopped:  # type: ignore[attr-defined]
            self._finish()
            return
        group = self._service._group
        if group is not None:
            executor = group.executor
            if "_carry_out" not in vars(executor):
                self._carry_out, executor._carry_out = executor._carry_out, self._check_action  # type: ignore[method-assign]
                pipeline = executor._pipeline
                self._handle, pipeline.handle = pipeline.handle, self._check_event  # type: ignore[method-assign]
            parts = [part for part in executor._parts.values() if part.server >= 0]
            live = [part for part in parts if part.tensor.slots and not part.tensor.state.is_void]
            in_flight = sum(part.length for part in live if part.stage is Stage.IN_FLIGHT and not part.is_pulled)
            queue: Queue = group.queue  # type: ignore[assignment]
            counted, limited = queue.pushed_bytes, queue.in_flight_bytes
            if in_flight != counted or limited > in_flight:
                raise InvariantError(f"{in_flight} bytes are in flight, {counted} not answered, {limited} take credit")

    def _check_event(self, event: RoundEvent, now: float) -> list[Action]:
        if isinstance(event, Answered):
            self._ledger.accepts(self.machine, event.part, event.round, event.source)
        elif isinstance(event, StepEnded):
            self._ledger.stepped(self.machine, event.step)
        return self._handle(event, now)

    def _check_action(self, action: Action) -> None:
        group = self._service._group
        if isinstance(action, MakeStep) and group is not None:
            self._ledger.steps(self.machine, action, group.topology.machines_of(action.part.tensor.spec))
        if isinstance(action, RoundDone) and action.tensor.parts and action.tensor.parts[0].server >= 0:
            self._check_contribution(action.tensor)
        self._carry_out(action)

    def _check_contribution(self, tensor: Tensor) -> None:
        """It outlives its round, until the next one is complete."""
        if tensor in self._given:
            address, data = self._given[tensor]
            if self._memory.at(address, len(data)).tobytes() != data:
                raise InvariantError(
                    f"the last contribution to {tensor.name} was overwritten before round {tensor.round}"
                )
        nbytes = tensor.spec.sent_nbytes
        if tensor.spec.ownership and tensor.spec.op is Op.BROADCAST:
            nbytes = sum(part.length for part in tensor.parts if part.contributes)
        if tensor.contributes or (tensor.contributions and nbytes):
            blocks = tensor.contributions or (tensor.slots[0].input,) * 2
            address = blocks[(tensor.round - 1) % 2].address  # the next round is the current one by now
            self._given[tensor] = (address, self._memory.at(address, nbytes).tobytes())

    def _finish(self) -> None:
        if not self.world.faults:
            self._check_end()
        self.exit_code = self._service._exit_code
        self._service._close()
        self.die()

    def _check_end(self) -> None:
        """All ranks have got all they wanted: nothing is under way, and only live tensors have memory."""
        group = self._service._group
        if group is None:
            raise InvariantError("it ends before it began")
        requests, executor = group.requests, group.executor
        tensors = group.agreement.tensors()
        slots = {slot.id for tensor in tensors for slot in tensor.slots}
        names = group.agreement._names.values()
        slots |= {slot.id for name in names for failed in name.failed.values() for slot in failed}
        slots |= {slot.id for tensor in group.agreement.kept() for slot in (*tensor.slots, *tensor.joined)}
        direct = [member for _, member in group._direct.members()]
        slots |= {s.id for member in direct for s in (member.slot, *(old for _, old in member.outgrown))}
        slots |= {slot.id for slot in group.joining._void}
        # A void tensor's last kernel may still run.
        known = requests.memory.slots.values()
        slots |= {s.id for s in known if s.tensor and s.tensor.state.is_void and s.tensor.running}
        # Parameters are declared with their gradients. If these are skipped, all may be over before they are agreed.
        slots |= {s.id for s in known if s.tensor is None and s.spec.ownership and s.spec.ownership != s.spec.name}
        if set(requests.memory.slots) != slots:
            raise InvariantError(f"slots {set(requests.memory.slots) ^ slots} leak, or are gone too soon")
        parts = [part for tensor in tensors for part in tensor.parts]
        kept = {part for tensor in group.agreement.kept() for part in tensor.parts}
        if set(executor._parts.values()) != {*parts, *kept} or any(part.stage is not Stage.WAITING for part in parts):
            raise InvariantError("partitions are under way, or of no tensor")
        if set(executor._frames) & set(parts) or any(tensor.running for tensor in tensors):
            raise InvariantError("answers are kept, or kernels run")
        asked = [item for item in group._fetches._in_flight if not _is_abandoned(item)]
        if any(part.answer is not None for part in parts) and not self.world.trials:
            raise InvariantError("answers' memory is kept")
        if any(isinstance(part, OwnedPart) and part.state is not StepState.SUMMING for part in parts):
            raise InvariantError("sums wait for their owners")
        if group.queue.in_flight_bytes or len(group.queue) or asked:
            raise InvariantError("credit is taken, or partitions wait for it")


def _is_abandoned(item: Transfer | AskSum) -> bool:
    """It was asked for, and then ranks joined without whom its round could not be."""
    return isinstance(item, Transfer) and not any(m.awaits(item.source, item.round) for m in item.targets)


class Server(Process):
    """A summation service. ``machine``: the GPU machine that it runs on; -1: a CPU machine."""

    def __init__(self, world: World, memory: Memory, name: str, machine: int) -> None:
        super().__init__(world, name)
        self.machine = machine
        self.host = f"machine {machine}" if machine >= 0 else name
        self.is_leaving = False
        self.has_stopped = False  # by itself: it was not killed
        self._memory = memory
        self._service: SummationService
        self._under_way: list[Round[Any]] = []
        self.has_been_replaced: Callable[[], object] = lambda: None  # what follows when a new job has begun

    def start(self, kind: type[SummationService], settings: Settings, connect: Any, runtime: SimulatedRuntime) -> None:
        """As ``Service.run`` begins."""

        def new_network(host: str, settings: Settings, traffic: object, *callbacks: Any) -> ServerNetwork:
            return ServerNetwork(runtime.network, self, *callbacks)

        kind = type("Service", (kind,), {"network_class": staticmethod(new_network)})
        machine_kind = pb.MACHINE_KIND_GPU if self.machine >= 0 else pb.MACHINE_KIND_CPU
        store = kind.store_class(settings.max_partition_bytes, self._memory.most_waiting_bytes)  # type: ignore[attr-defined]  # see parts.py
        it = self._service = kind(settings, machine_kind, connect, runtime, store)
        self._reduce, it._reduce = it._reduce, self._check_reduce  # type: ignore[method-assign]
        self._reduced, it._rounds.reduced = it._rounds.reduced, self._note_reduced  # type: ignore[method-assign]
        it._link = connect(settings, it._registration(), it._loop, it.control_events())
        it._loop.call_later(settings.stall_warn_s, it._warn_of_stalls)

    @property
    def address(self) -> str:
        return self._service.address

    @property
    def was_member(self) -> bool:
        """It has heard of the cluster."""
        return self._service._rounds.epoch > 0

    def drain(self) -> None:
        """It is to go, in order."""
        self.is_leaving = True
        self._service.stop("SIGTERM")

    def _check_reduce(self, round_: Round[Any]) -> None:
        """Each machine is counted once, in order."""
        what = f"round {round_.number} of {round_.partition}"
        machines = [contribution.header.sender for contribution in round_.in_order()]
        group = round_.in_order()[0].header.machines
        if group:
            is_right = len(machines) == group and machines == sorted(set(machines))
        else:
            is_right = machines == list(range(self._service._rounds.num_machines))
        if not is_right:
            raise InvariantError(f"{what} is summed over machines {machines}")
        self._under_way.append(round_)
        self._reduce(round_)

    def _note_reduced(self, round_: Round[Any], error: BaseException | None = None) -> list[ServerAction[Any]]:
        self._under_way.remove(round_)
        return self._reduced(round_, error)

    def check(self) -> None:
        if not self.is_alive:
            return
        self._check_share()
        if self._service._loop.stopped:  # type: ignore[attr-defined]
            self._check_end()
            self.exit_code = 1 if self._service._error is not None else self._service._status
            self.has_stopped = True
            self._service._close()
            self.die()
            if self._service.is_replaced:
                self.has_been_replaced()

    def _check_share(self) -> None:
        rounds = self._service._rounds
        if not rounds._has_share and rounds._rounds(RoundState.COLLECTING):
            raise InvariantError(f"{self.name} has no share, and keeps what machines give to another server")

    def _check_end(self) -> None:
        """Contributions are held for rounds under way only. Those that wait for ever are of void tensors."""
        rounds = self._service._rounds
        rounds_ = [r for group in rounds._generations.values() for p in group.values() for r in p.rounds.values()]
        held = sum(c.nbytes for r in rounds_ for c in r.contributions.values())
        held += sum(new.nbytes for each in rounds.accumulators._all() for new, _ in each.given.values())
        held += sum(c.nbytes for c in rounds._held)  # news of their epoch is on its way
        void = [round_ for round_ in self._under_way if round_ not in rounds_]  # of a group that is over
        held += sum(c.nbytes for round_ in void for c in round_.contributions.values())
        if rounds.counters.bytes_in_flight != held and not self.world.faults:
            raise InvariantError(f"{rounds.counters.bytes_in_flight} bytes count as held, {held} are")
        if any(not r.contributions or r.state is RoundState.DROPPED for r in rounds_):
            raise InvariantError("a round that is over, or void, is kept")
