"""Steps of a hosted optimizer under the backward pass: each partition steps once its sum is there.

    backward, a bucket's last gradient:  hand it over ─► the round's thread: compare numbers, once ─► begin its step
    step():  hand over the rest ─► wait for the thread ─► wait for the services ─► write the parameters

A step begins only after all ranks have found their numbers equal. From then on the step is made on all ranks, for all
buckets, whatever one of them finds out later: it is whole, or nobody has it. Parameters are written in step() alone,
because the backward pass reads them until its end.

Owns the thread of a round, which ends with the round. Must not know optimizers. Autograd's threads call ``_send`` with
the reducer's lock held, the training thread everything else. The thread takes no lock of the reducer.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from byteps_py.errors import BytePSError
from byteps_py.kernels.update_rules import Hyperparameters, UpdateRule
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.slot_view import PieceView
from byteps_py.torch.gradients.bucket import Bucket
from byteps_py.torch.gradients.hosted.delivery import HostedBucket, HostedReducer
from byteps_py.torch.gradients.hosted.states import Factors, HostedStates


@dataclass(frozen=True, slots=True)
class RoundNumbers:
    """Of each param_group, what a round steps with, as it was when its first gradients were handed over."""

    numbers: list[Hyperparameters]
    rules: list[UpdateRule]
    initial_sums: list[float]


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A bucket whose gradients are on their way. ``taking_part``: which of its parameters take part in the step."""

    bucket: HostedBucket
    slot_view: PieceView
    taking_part: tuple[bool, ...]


class BackwardRound:
    """Begins the steps of one round, on a thread of its own, as buckets are handed over.

    numbers: what they step with. versions: of the parameters, in order, when the round began. is_agreed: all ranks have
    these numbers, so that all of them make the step. begun: the buckets whose steps were begun. error: of the thread.
    """

    def __init__(self, numbers: RoundNumbers, versions: Sequence[int]) -> None:
        self.numbers, self.versions = numbers, versions
        self.is_agreed = False
        self.begun: list[tuple[HandedOver, HostedStates]] = []
        self.error: BaseException | None = None
        self._handed: queue.SimpleQueue[HandedOver | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, agree: Callable[[], bool], begin: Callable[[HandedOver], None]) -> None:
        """Call ``agree``, and if it is true, ``begin`` for each bucket of ``put``, until ``end``."""

        def run() -> None:
            try:
                if agree():
                    self.is_agreed = True
                    while (handed := self._handed.get()) is not None:
                        begin(handed)
            except BaseException as error:  # raised by step()
                self.error = error

        self._thread = threading.Thread(target=run, name="byteps-step-in-backward", daemon=True)
        self._thread.start()

    def put(self, handed: HandedOver) -> None:
        """Begin the step of this bucket, too."""
        self._handed.put(handed)

    def end(self) -> None:
        """No more buckets follow."""
        self._handed.put(None)

    def join(self) -> None:
        """Wait until the steps of all buckets are begun, after ``end``."""
        if self._thread is not None:
            self._thread.join()  # its waits have limits of their own


class CurrentRound:
    """The round under way, if there is one."""

    def __init__(self) -> None:
        self.round: BackwardRound | None = None

    def finish(self) -> None:
        """Forget it, and let its thread end: the step is made, the session is about to be closed, or the optimizer is
        gone."""
        if self.round is not None:
            self.round.end()
            self.round = None


class DeviceOrder:
    """Lets a round's thread read parameters on CUDA as they are when the round begins, without waiting for the rest of
    the backward pass: on streams of its own, behind events. Parameters on the CPU need none."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def streams_from_now(self, devices: set[torch.device]) -> list[torch.cuda.Stream]:
        """The streams on which the thread reads the parameters of ``devices``."""
        streams = []
        for device in devices:
            if device.type == "cuda":
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)
                stream = self._streams[device]
                stream.wait_event(torch.cuda.current_stream(device).record_event())
                streams.append(stream)
        return streams


class InBackwardReducer(HostedReducer):
    """Begins steps while gradients are still computed. ``use`` comes before the first round."""

    _read: Callable[[], RoundNumbers | None]
    _compare: Callable[[RoundNumbers], bool]
    current: CurrentRound

    def use(self, read: Callable[[], RoundNumbers | None], compare: Callable[[RoundNumbers], bool]) -> None:
        """``read`` returns the numbers; None: step() will say what is wrong with them. ``compare`` raises if those of
        other ranks differ, and returns False if there is no optimizer any more; the round's thread calls it. Both hold
        the optimizer weakly."""
        self._read, self._compare = read, compare
        self._device_order = DeviceOrder()
        self.current = CurrentRound()
        self._context.unfinished.add(self.current)
        self.accepts_sparse = False  # ranks step sparse rows themselves, after all gradients are there

    @property
    def round(self) -> BackwardRound | None:
        """From its first hand-over to the end of its step; None as long as there are no states, in the first step."""
        return self.current.round

    def _send(self, bucket: Bucket, is_early: bool = False) -> None:
        super()._send(bucket, is_early)
        if isinstance(bucket, HostedBucket) and bucket.slot_view is not None and self._is_agreed and self.has_states:
            if self.current.round is None:
                self.current.round = self._begin_round()
            if self.current.round is not None:
                self.current.round.put(HandedOver(bucket, bucket.slot_view, bucket.taking_part))

    def _begin_round(self) -> BackwardRound | None:
        numbers = self._read()
        if numbers is None:
            return None
        params = [param for bucket in self.hosted for param in bucket.params]
        streams = self._device_order.streams_from_now({param.device for param in params})
        new = BackwardRound(numbers, [param._version for param in params])

        def agree() -> bool:
            if not self._may_begin(numbers):
                return False
            with contexts.use(self._context):
                return self._compare(numbers)

        def begin(handed: HandedOver) -> None:
            with contextlib.ExitStack() as stack:
                for stream in streams:
                    stack.enter_context(torch.cuda.stream(stream))
                self._begin(new, handed)

        new.start(agree, begin)
        return new

    def _may_begin(self, numbers: RoundNumbers) -> bool:
        """False if something has to be made, or is wrong, that step() finds before any step is begun."""
        for bucket in self.hosted:
            if bucket.is_active:
                states = self._states.get(bucket)
                if (
                    not isinstance(states, HostedStates)
                    or states.session is not self._context.session
                    or bucket.slot_view is None
                    or not states.follows(bucket.slot_view.slot)
                    or states.kind.rule != numbers.rules[self.group_of[bucket.params[0]]]
                    or any(tuple(p.shape) != s for p, s in zip(bucket.params, bucket.request.shapes, strict=True))
                ):
                    return False
        return True

    def _begin(self, round_: BackwardRound, handed: HandedOver) -> None:
        handed.slot_view.wait_for_departure()  # the service hears of the gradients before it hears of the step
        states = self._states[handed.bucket]
        if isinstance(states, HostedStates) and states.follows(handed.slot_view.slot):  # otherwise step() begins it
            numbers = round_.numbers.numbers[self.group_of[handed.bucket.params[0]]]
            states.shadowed = self.shadow.next if self.shadow is not None else None
            states.begin_step(numbers, Factors(), handed.taking_part)
            round_.begun.append((handed, states))

    # ---- the end of a round ------------------------------------------------------------------------------------

    def end_round(self) -> BackwardRound | None:
        """After ``finish``: wait until the steps of what was handed over are begun. Raises nothing."""
        round_ = self.current.round
        if round_ is not None:
            round_.end()
            round_.join()
            for handed, _ in round_.begun:
                handed.bucket.summed = None
        return round_

    def begin_steps(self, numbers: Sequence[Hyperparameters], factors: Factors, initial_sums: Sequence[float]) -> None:
        super().begin_steps(numbers, factors, initial_sums)  # those that are not begun
        if self.current.round is not None:
            self._due[:0] = [(states, handed.taking_part) for handed, states in self.current.round.begun]

    def drop(self) -> None:
        """See GradientReducer. Steps that were begun are made, as on all ranks, and their parameters are not taken."""
        super().drop()
        round_ = self.end_round()
        if round_ is not None and round_.is_agreed:
            with contextlib.suppress(BytePSError):  # discarded anyway
                self.begin_steps(round_.numbers.numbers, Factors(), round_.numbers.initial_sums)
                due, self._due = self._due, []
                if self.shadow is not None:
                    self.shadow.step += 1  # copies have made it, though it is of no use without a record
                for states, taking_part in due:
                    states.take_parameters([False] * len(taking_part), self._context.mover(states.device))
        self.current.finish()
