"""What a training process can ask of the service; front ends are written against this alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from byteps_py.session.peers import LocalPeers
from byteps_py.tensors import Layout, TensorSpec


@dataclass(slots=True, eq=False, weakref_slot=True)
class Slot:
    """A declared tensor's memory in this process, and where its current round stands.

    ``inputs``: where contributions go, used in turn; ``result``: where the result lies once ``wait``
    returned. ``result`` may be the same memory as an input. All are writable views, inputs of ``spec.nbytes`` bytes,
    the result of ``spec.result_nbytes`` bytes.
    """

    spec: TensorSpec
    inputs: tuple[memoryview, ...]
    result: memoryview
    id: int = 0
    round: int = 0  # rounds handed over so far
    done_round: int = 0  # rounds delivered so far
    begun_bytes: int = 0  # of the next round, handed over while it is not all there
    strips: list[int] = field(default_factory=list)  # of the current result, those there and not yet taken
    blame: int = 0  # who has made the latest result NaN or infinite, if the spec asks: see blame.py
    error: Exception | None = None

    @property
    def input(self) -> memoryview:
        """Where the next contribution goes."""
        return self.inputs[self.round % len(self.inputs)]

    @property
    def pending(self) -> bool:
        """Handed over, and neither delivered nor failed."""
        return self.error is None and self.done_round < self.round


class Observer(Protocol):
    """Hears of a session's rounds. Called by any thread, ``delivered`` with the session's lock held: must be quick, and
    must not call the session."""

    def begun(self, slot: Slot, at_ns: int | None = None) -> None:
        """The slot's round number ``slot.round`` was handed over; ``at_ns`` of time.perf_counter_ns, now by default."""

    def delivered(self, slot: Slot) -> None:
        """Its result is there."""

    def closed(self) -> None:
        """No more is to come. Said by the one who closes the session."""


class Session(ABC):
    """One rank's membership in a job. Methods may be called by any thread unless they say otherwise.

    Ranks are numbered machine by machine: ``rank = first rank of the machine + local_rank``.
    """

    observer: Observer | None = None
    #: Tensors of different incarnations never meet, whatever their names: a rank that failed in the middle of a step
    #: has left contributions behind. The same on all ranks; set before anything is declared.
    incarnation: int = 0
    is_homogeneous: bool = True  #: machines have equally many ranks
    #: Set before ``close`` by a rank of an elastic job that is about to come back: why, and whether all do so.
    returning: tuple[str, bool] | None = None
    #: Of an elastic job: all ranks were in the group before this one, and left it in order. They are equal.
    is_continued: bool = False
    #: Of an elastic job: the epoch with which this group of ranks began. Later groups have greater ones.
    since_epoch: int = 0

    def note_synced(self) -> None:  # noqa: B027  most sessions have no next group
        """Of an elastic job: this rank has the state of this group. Those with that of the latest come first in the
        next one, as all take the state of its rank 0."""

    def check_open(self) -> None:  # noqa: B027  whoever has nothing to say is open
        """Raises what every call would raise: the session is closed, or this is a forked child of the rank."""

    @property
    def peers(self) -> LocalPeers | None:
        """This rank's dealings with the other ranks of its machine, if it has any."""
        return None

    rank: int
    size: int
    local_rank: int
    local_size: int
    machine_index: int
    num_machines: int

    @abstractmethod
    def declare(self, specs: Sequence[TensorSpec]) -> list[Slot]:
        """Memory for tensors of these specs; one local round trip, no waiting for other ranks.

        A name that is declared already gives its slot back if the spec agrees; else the name gets a new slot,
        and the new spec must be agreed by all ranks before its first round. Order of declaration is free.
        A slot's memory is this rank's until it declares the name again and gets another.
        Ranks outside a spec's group declare nothing and are not waited for. A GATHER or an EXCHANGE is not voted on;
        declared again with more room it gets a new slot, which goes on with the rounds of the old one.
        Raises UsageError if a name's slot is pending, or handed over in part, and the spec differs, or if this rank
        is not in the group of a spec.
        """

    @abstractmethod
    def hand_over(self, slot: Slot, nbytes: int | None = None, layout: Layout | None = None) -> None:
        """The next round's contribution lies in ``slot.input``: all of it, or the first ``nbytes``, in the order of
        ``TensorChunks``.

        With ``nbytes`` below the tensor's size, the round goes on with further calls until all is there
        (the service already works on what it has). A GATHER or an EXCHANGE is handed over whole, with its ``layout``;
        without one that of the round before holds. Raises UsageError if an earlier round is pending, or if the
        name was declared anew with another slot.
        """

    @abstractmethod
    def is_done(self, slot: Slot) -> bool:
        """True once ``wait`` would return, or raise, at once. Never blocks."""

    @abstractmethod
    def wait(self, slot: Slot, timeout_s: float | None = None) -> None:
        """Return when the round's result lies in ``slot.result``. The GIL is free meanwhile.

        Raises MismatchError (ranks disagree about the tensor; declare it again to go on with the name),
        StallError (``timeout_s``, or the job's stall limit, passed) or PeerLostError.
        """

    def take_in_strips(self, slot: Slot) -> bool:
        """From the next round on, ``wait_for_strips`` tells what of a result is there before all is. False: it never
        does, as nothing would be gained. To be called before that round."""
        return False

    def wait_for_strips(self, slot: Slot, timeout_s: float | None = None) -> list[int]:
        """Return as soon as more of the round's result lies in ``slot.result``: which strips, see chunks.py; none once
        the round is over, and ``wait`` would return, or raise, at once. Raises StallError. One thread at a time."""
        return []

    @abstractmethod
    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when every rank has called it. One thread at a time."""

    @abstractmethod
    def join(self, timeout_s: float | None = None) -> int:
        """This rank has no more data. Returns, on every rank, the rank that joined last, once all have.

        Until then, reductions go on without the ranks that have joined, from the round on that these have not handed
        over; an average still divides by the number of all ranks of its group. What needs every rank (a broadcast, a
        gather, an exchange, a scattered reduction) raises JoinedError where it is waited for. Afterwards nothing is
        declared any more: each name must be declared again. One thread at a time, and no other uses the session.
        Raises UsageError if a round is handed over in part.
        """

    def hosts_changed(self) -> tuple[bool, bool]:
        """(added, removed): in an elastic job, since this session began. Never blocks."""
        return False, False

    @abstractmethod
    def close(self) -> None:
        """Leave the job. Pending rounds are abandoned; every later call raises NotInitializedError."""
