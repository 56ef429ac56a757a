"""Works as they are carried out: a round in a lane, or several works as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from byteps_py.torch.engine.completion import Completer
from byteps_py.torch.engine.lanes import Lane
from byteps_py.torch.engine.work import Call, GroupContext, Pending


class LaneOperation(Pending):
    """A round in a lane. ``call.finish`` copies its result to the outputs. ``failed`` is called if it fails before."""

    def __init__(
        self,
        around: GroupContext,
        completer: Completer | None,
        call: Call,
        lane: Lane,
        device: torch.device,
        failed: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(around, call.what, call.outputs, call.timeout_s)
        self._completer = completer
        self._lane: Lane | None = lane
        self._device = device
        self._deliver = call.finish
        self._failed = failed

    def _complete(self, deadline: float) -> None:
        lane, deliver = self._lane, self._deliver
        if lane is None:
            return
        self._slices(deadline, lane.wait)
        self._failed = None  # whatever happens here now, the members have agreed on this kind and go on using it
        if deliver is not None:
            deliver()
        if self._device.type == "cuda":
            self._event = torch.cuda.current_stream(self._device).record_event()

    def _is_ready(self) -> bool:
        return self._around.aborted is not None or self._lane is None or self._lane.is_done

    def _gave_up(self) -> bool:
        return self._lane is not None and self._lane.failed

    def _release(self) -> None:
        lane, self._lane, self._deliver = self._lane, None, None
        if lane is not None and lane.occupant is self:
            lane.vacate()
        if self._error is not None and self._failed is not None:
            self._failed()

    def _hand_to_pool(self) -> None:
        if self._completer is not None:
            self._completer.add(self)
        else:
            super()._hand_to_pool()


class Together(Pending):
    """Several works as one."""

    def __init__(
        self, around: GroupContext, what: str, works: Sequence[Pending], outputs: list[torch.Tensor], timeout_s: float
    ) -> None:
        super().__init__(around, what, outputs, timeout_s)
        self._works = list(works)

    def _complete(self, deadline: float) -> None:
        for work in self._works:
            self._slices(deadline, work.settle)
        for work in self._works:
            work.wait()

    def _is_ready(self) -> bool:
        return all(work.is_completed() for work in self._works)
