"""The interface between a training process and the service. Front ends are written against this module alone.

Owns no memory, socket or thread: see solo.py and service/remote.py for the two implementations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from byteps_py.errors import UnsupportedError
from byteps_py.session.peers import PeerTransport
from byteps_py.session.slot import Slot
from byteps_py.session.state_host import StateHost
from byteps_py.tensors import Layout, TensorSpec


class Observer(Protocol):
    """Observes the rounds of a session. Any thread calls these methods, and ``delivered`` is called with the session's
    lock held: an implementation must be quick and must not call the session."""

    def begun(self, slot: Slot, at_ns: int | None = None) -> None:
        """Round ``slot.round`` of ``slot`` was handed over at ``at_ns`` (of time.perf_counter_ns; None: now)."""

    def delivered(self, slot: Slot) -> None:
        """The result of the slot's current round was delivered."""

    def closed(self) -> None:
        """No further call follows. The owner of the observer calls it after it has closed the session."""


class Session(ABC):
    """The membership of one rank in a job. Any thread may call a method unless its docstring says otherwise.

    Ranks are numbered machine by machine: ``rank = first rank of the machine + local_rank``.
    """

    observer: Observer | None = None
    #: Keeps tensors apart that have the same name in different incarnations: a rank that failed in the middle of a step
    #: leaves contributions behind. The same on all ranks; set before the first declaration.
    incarnation: int = 0
    #: Ranks of different machines exchange addresses, and connect if the settings of all of them allow it.
    exchanges_addresses: bool = False
    is_homogeneous: bool = True  #: all machines have the same number of ranks
    has_shadow_servers: bool = False  #: there are machines whose servers can keep copies of an optimizer's states
    #: Set before ``close`` by a rank of an elastic job that will rejoin: (reason, whether all ranks do so).
    returning: tuple[str, bool] | None = None
    #: Set before ``close`` by a front end whose user has said that training is done: servers drop the states that they
    #: keep for a restarted job.
    is_finished: bool = False
    #: Elastic jobs: all ranks were in the previous group and left it in order, so they have the same state.
    is_continued: bool = False
    #: Elastic jobs: the epoch with which this group of ranks began. Later groups have greater epochs.
    since_epoch: int = 0

    #: The progress of this rank in sequences of optimizer steps that are the same on all ranks: (steps begun,
    #: optimizers that have stepped), by sequence. A rank that waits reports it, so that a rank with other optimizers is
    #: found. It is replaced, never changed.
    steps_begun: Mapping[str, tuple[int, int]] = MappingProxyType({})

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
