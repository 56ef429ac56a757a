"""A round of a slot, as an operation of a process group. Any thread."""

from __future__ import annotations

from collections.abc import Callable

import torch

from byteps_py.torch.collectives.completion import Completer
from byteps_py.torch.collectives.group_work import GroupContext, GroupWork
from byteps_py.torch.collectives.slot_view import SlotView
from byteps_py.torch.collectives.work import Call


class ServiceWork(GroupWork):
    """``call.finish`` copies the result to the outputs. ``failed`` is called if the round fails before that.
    ``completer`` completes its future; None: a thread of the pool does, in no order with others."""

    def __init__(
        self,
        group_context: GroupContext,
        completer: Completer | None,
        call: Call,
        view: SlotView,
        device: torch.device,
        failed: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(group_context, call)
        self._completer = completer
        self._view: SlotView | None = view
        self._device = device
        self._failed = failed

    def _complete(self, deadline: float) -> None:
        view = self._view
        if view is None:
            return
        self._wait_in_slices(deadline, view.wait)
        self._failed = None  # a later error is local: members have agreed on this kind and continue to use it
        if self._finish is not None:
            self._finish()
        if self._device.type == "cuda":
            self._event = torch.cuda.current_stream(self._device).record_event()

    def _is_ready(self) -> bool:
        return self._group_context.aborted is not None or self._view is None or self._view.is_done

    def _gave_up(self) -> bool:
        return self._view is not None and self._view.has_failed

    def _release(self) -> None:
        view, self._view, self._finish = self._view, None, None
        if view is not None and view.occupant is self:
            view.vacate()
        if self._error is not None and self._failed is not None:
            self._failed()

    def _hand_to_pool(self) -> None:
        if self._completer is not None:
            self._completer.add(self)
        else:
            super()._hand_to_pool()
