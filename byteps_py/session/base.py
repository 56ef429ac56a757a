"""The interface between a training process and the service. Front ends are written against this module alone.

``Session`` declares and sums tensors, each of which is a ``Slot``. ``StateHost`` keeps an optimizer's states and makes
its steps. Owns no socket or thread: see solo.py and service/remote.py for the two implementations. ``fork_count``
detects that this process was forked: a child is a copy of its rank, and only the rank may communicate. Any thread.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from byteps_py.errors import UnsupportedError, UsageError
from byteps_py.kernels.optimizer_steps import StepSegment
from byteps_py.kernels.update_rules import StepKind
from byteps_py.session.peers import PeerTransport
from byteps_py.session.progress import Progress
from byteps_py.session.round_recorder import RoundRecorder
from byteps_py.system.flight_recorder import GroupCounter
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import DType, Layout, TensorSpec

fork_count = 0  # forks in this process's ancestry since the import of this module; cheaper to read than the pid


def _count_fork() -> None:
    global fork_count
    fork_count += 1


os.register_at_fork(after_in_child=_count_fork)


def forked_error(rank: object) -> UsageError:
    """The error of every session method in a forked child of ``rank``."""
    return UsageError(
        f"process {os.getpid()} was forked from rank {rank}, which alone may communicate; start new ranks with "
        "bpslaunch or spawn"
    )


#: The length of the intervals of ``ResultRate``.
SPAN_S = 10.0


@dataclass(slots=True, eq=False, weakref_slot=True)
class Slot:
    """The memory of a declared tensor in this process, and the state of its current round.

    ``inputs``: the buffers for contributions, used in turn; each is a writable view of ``spec.nbytes`` bytes.
    ``result``: a writable view of the result, valid once ``wait`` has returned. ``result`` may be the same memory as an
    input.
    """

    spec: TensorSpec
    inputs: tuple[memoryview, ...]
    result: memoryview
    id: int = 0
    round: int = 0  # rounds handed over so far
    done_round: int = 0  # rounds delivered so far
    begun_bytes: int = 0  # of the next round: handed over in part so far
    chunks: list[int] = field(default_factory=list)  # of the current result: delivered, not yet taken by the caller
    nonfinite_ranks: int = 0  # that made the latest result NaN or infinite, if the spec asks: see rank_bits.py
    error: Exception | None = None
    coded_state: memoryview | None = None  # what its machine keeps for the codec, if this rank has it
    drawn: int = 0  # see Codec
    flight_group: GroupCounter | None = None  # of its rounds in the flight recorder
    flight_number: int = 0  # of the current round there; 0: it is not recorded

    @property
    def input(self) -> memoryview:
        """The buffer for the next contribution, of ``spec.nbytes`` bytes."""
        return self.inputs[self.round % len(self.inputs)]

    @property
    def pending(self) -> bool:
        """True if a round was handed over and is neither delivered nor failed."""
        return self.error is None and self.done_round < self.round


@dataclass(frozen=True, slots=True)
class CodedState:
    """The state that a machine keeps for a codec from round to round. ``data``: the parts of ``Codec.state_nbytes``;
    empty if another rank has them. ``codec.drawn``: up to now."""

    shape: tuple[int, ...]
    dtype: DType
    codec: Codec
    data: bytes


class ResultRate:
    """The observer of every session: how many bytes of results come in a second. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bytes = 0
        self._bytes_before = 0  # in intervals that are over
        self._since = clock()
        self._last: tuple[int, float] | None = None

    def begun(self, slot: Slot, at_ns: int | None = None) -> None:
        """See Observer."""

    def delivered(self, slot: Slot) -> None:
        """See Observer."""
        with self._lock:
            now = self._clock()
            if now - self._since >= SPAN_S:
                self._end_span(now)
            self._bytes += slot.spec.nbytes

    def closed(self) -> None:
        """See Observer."""

    def speed(self) -> tuple[int, float]:
        """(time in ms since the epoch, MB/s) of the last interval of ``SPAN_S`` that is over; before, of the present
        one."""
        with self._lock:
            now = self._clock()
            if now - self._since >= SPAN_S:
                self._end_span(now)
            return self._last or self._measured(now)

    @property
    def total_bytes(self) -> int:
        """Of all results so far."""
        return self._bytes_before + self._bytes

    def _measured(self, now: float) -> tuple[int, float]:
        elapsed = now - self._since
        return int(time.time() * 1e3), self._bytes / elapsed / 1e6 if elapsed > 0 else 0.0

    def _end_span(self, now: float) -> None:
        self._last = self._measured(now)
        self._bytes_before += self._bytes
        self._bytes, self._since = 0, now


@dataclass(eq=False, slots=True)
class HostedShard:
    """The states of an optimizer for the elements of a tensor that this rank owns, kept by the service. Between steps
    this rank may read and write them.

    Attributes:
        kind: of its steps.
        source: the slot of the gradients.
        target: the slot of the parameters.
        states: the memory of the master and of each moment; the elements that this rank owns, one after the other.
        owners: (first element, number of elements, rank) of each shard of the tensor, in order.
        error: why the states can't be kept.
    """

    kind: StepKind
    source: Slot
    target: Slot
    states: tuple[memoryview, ...] = ()
    owners: tuple[tuple[int, int, int], ...] = ()
    id: int = 0
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class ShadowedStep:
    """A step that other machines make as well, with their copies of the states.

    Attributes:
        run: of one optimizer in one incarnation of the job, see ShadowPartition.
        step: its number, the same for all shards that step together.
        durable: a step for which all copies, and all ranks' records, are held by other machines.
        is_whole: all states of the run have been held: data of earlier runs is not needed any more.
    """

    run: int
    step: int
    durable: int
    is_whole: bool = False


class StateHost(ABC):
    """The states of hosted optimizers, of one session. Any thread may call a method; ``wait`` is that of Session.

    ``max_record_bytes``: how much all ranks may have alike in a record.
    """

    max_record_bytes: int = 0

    @abstractmethod
    def host(
        self, kind: StepKind, source: Slot, target: Slot, before: HostedShard | None = None, run: int = 0
    ) -> HostedShard:
        """Have states kept, with any content, for the steps from the gradients of ``source`` to the parameters of
        ``target`` (see TensorSpec.ownership). Returns once all ranks have declared both. Raises the errors of ``wait``
        for either. ``before``: the states to go on with, whose slots were declared again."""

    @abstractmethod
    def begin_step(
        self,
        shard: HostedShard,
        segments: Sequence[StepSegment],
        is_last: bool = True,
        shadowed: ShadowedStep | None = None,
    ) -> None:
        """Let each sum of the source's latest round, once it is there, change the states. ``target`` is handed over
        afterwards, on all ranks; its result are the parameters. The states must not be used until both rounds are
        delivered; or, if more steps with the same sums follow (not ``is_last``), until ``wait_for_step`` returns."""

    @abstractmethod
    def record_step(self, shadowed: ShadowedStep, common: bytes, attached: bytes) -> None:
        """Have other machines hold the record of this rank after a step that all shards have begun: the data that is
        the same on all ranks (of rank 0; at most ``max_record_bytes``), and the rank's own data (at most
        MAX_ATTACHED_BYTES). Of much that is its own, waits until they have that of the step before. Raises the errors
        of ``wait``."""

    @property
    @abstractmethod
    def held(self) -> tuple[int, bool]:
        """Other machines hold the states and the records of this rank after all steps up to this one, 0 for none; and
        whether they have held all states of this rank. Never blocks."""

    @abstractmethod
    def wait_until_held(self, step: int) -> None:
        """Return when ``held`` has come to ``step``, or no machine has taken the record of this step or a later one.
        Raises the errors of ``wait``."""

    @property
    @abstractmethod
    def refused_step(self) -> int:
        """The latest step whose record of this rank no machine has taken; 0: none. Known once ``held`` is beyond it."""

    @abstractmethod
    def wait_for_step(self, shard: HostedShard) -> None:
        """Return when a step that is not the last of its round is made. Raises the errors of ``wait``."""

    @abstractmethod
    def skip_step(self, source: Slot) -> None:
        """Make no step with the sums of the latest round of ``source``. All ranks do so, and wait for the round."""

    @abstractmethod
    def square_sum(self, shard: HostedShard, ranges: Sequence[range], timeout_s: float | None = None) -> float:
        """The sum of the squares of this rank's averages in the latest round of the source, before its step is begun.
        ``ranges``: of the elements of the states. Raises the errors of ``wait``."""

    @abstractmethod
    def server_addresses(self) -> tuple[str, ...]:
        """The addresses of the job's servers at the moment, which may hold states of an earlier run: ``tcp://host:port``
        of each. Raises the errors of ``wait``."""

    @abstractmethod
    def release_shard(self, shard: HostedShard) -> None:
        """Drop the states of the shard. The service learns of it with the next ``host``. Raises nothing."""


class Observer(Protocol):
    """Observes the rounds of a session. Any thread calls these methods, and ``delivered`` is called with the session's
    lock held: an implementation must be quick and must not call the session."""

    def begun(self, slot: Slot, at_ns: int | None = None) -> None:
        """Round ``slot.round`` of ``slot`` was handed over at ``at_ns`` (of time.perf_counter_ns; None: now)."""

    def delivered(self, slot: Slot) -> None:
        """The result of the slot's current round was delivered."""

    def closed(self) -> None:
        """No further call follows. The owner of the observer calls it after it has closed the session."""

    @property
    def total_bytes(self) -> int:
        """Of all results that were delivered so far."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about the machines of a job, the same on all ranks.

    Attributes:
        slowest_mbit: the rate of the slowest link; 0: not known.
        replicated_gain: the time of a hosted step on the links if each state has one owner, divided by that of a step
            with states on each machine.
        shadowed_gain: the same of a step whose states are shadowed.
        memory_bytes: the memory that the machine with the least of it had left when it joined the job.
    """

    slowest_mbit: float = 0.0
    replicated_gain: float = 1.0
    shadowed_gain: float = 1.0
    memory_bytes: int = 0


class Session(ABC):
    """The membership of one rank in a job. Any thread may call a method unless its docstring says otherwise.

    Ranks are numbered machine by machine: ``rank = first rank of the machine + local_rank``.
    """

    observer: Observer | None = None
    #: Records the rounds, and operations beside them, for the case that something goes wrong.
    flight: RoundRecorder | None = None
    #: Keeps tensors apart that have the same name in different incarnations: a rank that failed in the middle of a step
    #: leaves contributions behind. The same on all ranks; set before the first declaration.
    incarnation: int = 0
    #: Ranks of different machines exchange addresses, and connect if the settings of all of them allow it.
    exchanges_addresses: bool = False
    machine_facts: MachineFacts = MachineFacts()
    is_homogeneous: bool = True  #: all machines have the same number of ranks
    has_shadow_servers: bool = False  #: there are machines whose servers can keep copies of an optimizer's states
    #: Set before ``close`` by a rank of an elastic job that will rejoin: (reason, whether all ranks do so).
    returning: tuple[str, bool] | None = None
    #: Set before ``close`` by a front end whose user has said that training is done: servers drop the states that they
    #: keep for a restarted job.
    is_finished: bool = False
    #: Elastic jobs: all ranks were in the previous group and left it in order, so they have the same state.
    is_continued: bool = False
    #: Elastic jobs: some ranks have the state of an earlier group (``note_synced``): training has begun.
    is_under_way: bool = False
    #: Elastic jobs: this rank is one of them.
    has_synced: bool = False
    #: Elastic jobs: the epoch with which this group of ranks began. Later groups have greater epochs.
    since_epoch: int = 0

    #: The progress of this rank in sequences of optimizer steps that are the same on all ranks: (steps begun,
    #: optimizers that have stepped), by sequence. A rank that waits reports it, so that a rank with other optimizers is
    #: found. It is replaced, never changed.
    steps_begun: Mapping[str, tuple[int, int]] = MappingProxyType({})

    #: Makes a range of the profiler for a wait of a thread; it is given what says for what. None: nobody profiles.
    profile_wait: Callable[[Callable[[], str]], AbstractContextManager[object]] | None = None

    #: The work of this rank, in this session and in those before. Its owner replaces it, before the first operation.
    progress: Progress

    @property
    def result_bytes(self) -> int:
        """Of all results that the service has delivered in this session; 0 if nothing observes it."""
        return self.observer.total_bytes if self.observer is not None else 0

    def tell_progress(self) -> None:  # noqa: B027  most sessions have nobody to tell
        """Tell the service how far ``progress`` is, at most once a second. Never blocks."""

    def note_synced(self) -> None:  # noqa: B027  most sessions have no next group
        """Elastic jobs: record that this rank has the state of this group. In the next group, ranks with the latest
        state come first, because all ranks take the state of rank 0."""

    def check_open(self) -> None:  # noqa: B027  the default is open
        """Raises the error that every method would raise: NotInitializedError if the session is closed, UsageError in a
        forked child of the rank, or the error that has ended the session."""

    @property
    def peers(self) -> PeerTransport | None:
        """The messages and memory between this rank and the other ranks of its machine; None if there are no other
        ranks."""
        return None

    rank: int
    size: int
    local_rank: int
    local_size: int
    machine_index: int
    num_machines: int

    @abstractmethod
    def declare(self, specs: Sequence[TensorSpec]) -> list[Slot]:
        """Allocate slots for ``specs``, in their order. One local round trip; does not wait for other ranks.

        A name that is already declared keeps its slot if the spec agrees. Otherwise the name gets a new slot, and all
        ranks must agree on the new spec before its first round. The order of declarations is free. The memory of a slot
        belongs to this rank until it declares the name again and gets another slot. Ranks outside a spec's group
        declare nothing, and the group does not wait for them. The specs of a GATHER or an EXCHANGE are not compared
        between ranks. Declared again with more capacity, it gets a new slot, which continues the rounds of the old one.

        Raises UsageError if the slot of a name is pending, or handed over in part, and the spec differs, or if this
        rank is not in the group of a spec.
        """

    @abstractmethod
    def hand_over(self, slot: Slot, nbytes: int | None = None, layout: Layout | None = None) -> None:
        """Start the next round: ``slot.input`` holds the contribution, or its first ``nbytes`` bytes in the order of
        ``Chunks``.

        With ``nbytes`` below the tensor's size, further calls hand over the rest; the service already works on the
        first part. A GATHER or an EXCHANGE is handed over whole, with its ``layout``; None: the layout of the previous
        round.

        Raises UsageError if an earlier round is pending, or if the name was declared again with another slot.
        """

    @abstractmethod
    def is_done(self, slot: Slot) -> bool:
        """True if ``wait`` would return, or raise, at once. Never blocks."""

    @abstractmethod
    def wait(self, slot: Slot, timeout_s: float | None = None) -> None:
        """Return when ``slot.result`` holds the result of the round. Releases the GIL while it waits. ``timeout_s``:
        None: the job's stall limit.

        Raises MismatchError (ranks disagree about the tensor; declare it again to use the name), StallError
        (``timeout_s`` or the job's stall limit passed) or PeerLostError.
        """

    def request_chunks(self, slot: Slot) -> bool:
        """Ask the service to deliver results of ``slot`` chunk by chunk, from the next round on: see
        ``wait_for_chunks``. Call it before that round begins. False: results are delivered whole, as chunks would gain
        nothing."""
        return False

    def wait_for_chunks(self, slot: Slot, timeout_s: float | None = None) -> list[int]:
        """Return the indices of newly delivered chunks of the round's result (see chunks.py), as soon as there are any.
        An empty list: the round is over, and ``wait`` returns, or raises, at once. Raises StallError. One thread at a
        time."""
        return []

    def coded_states(self, names: Collection[str] | None = None) -> dict[str, CodedState]:
        """Copies of what this rank keeps for its machine's codecs, by tensor, also of tensors that are not declared
        yet. ``names``: of these only; None: of all. Raises UsageError if a round of such a tensor is under way."""
        return {}

    def set_coded_states(self, states: Mapping[str, CodedState]) -> None:  # noqa: B027  most sessions have no codecs
        """Go on with these where tensors are of the same kind, now or once they are declared; others become zeros.
        Raises UsageError if a round of such a tensor is under way."""

    @property
    def state_host(self) -> StateHost:
        """The interface to the service that keeps an optimizer's states and makes its steps. Raises UnsupportedError if
        this session has none."""
        raise UnsupportedError("this session has no service that keeps an optimizer's states")

    @abstractmethod
    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when every rank has called it. Raises StallError and the error that ends the session. One thread at a
        time."""

    @abstractmethod
    def join(self, timeout_s: float | None = None) -> int:
        """Declare that this rank has no more data. Returns, on every rank, the rank that joined last, once all have
        joined.

        Until then, reductions continue without the ranks that have joined, from the first round on that these ranks
        have not handed over. An average still divides by the number of all ranks of its group. An operation that needs
        every rank (a broadcast, a gather, an exchange, a scattered reduction) raises JoinedError where it is waited
        for. After the join all declarations are void: each name must be declared again. One thread at a time, and no
        other thread may use the session meanwhile.

        Raises UsageError if a round is handed over in part.
        """

    def hosts_changed(self) -> tuple[bool, bool]:
        """Elastic jobs: whether hosts were (added, removed) since this session began. Never blocks."""
        return False, False

    @abstractmethod
    def close(self) -> None:
        """Leave the job. Pending rounds are abandoned; every later call raises NotInitializedError."""
