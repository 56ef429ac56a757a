"""The interface between a training process and the service that keeps an optimizer's states and makes its steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from byteps_py.kernels.step_segments import StepSegment
from byteps_py.kernels.update_rules import StepKind
from byteps_py.session.slot import Slot


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

    @property
    @abstractmethod
    def refused_step(self) -> int:
        """The latest step whose record of this rank no machine has taken; 0: none. Known once ``held`` is beyond it."""

    @abstractmethod
    def wait_for_step(self, shard: HostedShard, timeout_s: float | None = None) -> None:
        """Return when a step that is not the last of its round is made. Raises the errors of ``wait``."""

    @abstractmethod
    def skip_step(self, source: Slot) -> None:
        """Make no step with the sums of the latest round of ``source``. All ranks do so, and wait for the round."""

    @abstractmethod
    def square_sum(self, shard: HostedShard, ranges: Sequence[range], timeout_s: float | None = None) -> float:
        """The sum of the squares of this rank's averages in the latest round of the source, before its step is begun.
        ``ranges``: of the elements of the states. Raises the errors of ``wait``."""

    @abstractmethod
    def release_shard(self, shard: HostedShard) -> None:
        """Drop the states of the shard. The service learns of it with the next ``host``. Raises nothing."""
