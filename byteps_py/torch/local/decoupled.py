"""DiLoCo in which no machine waits for a slow one: a quorum and a measured grace window decide who is combined.

    each machine: outer step with its own change / ranks ─► servers: global += what the step changed
                  own parameters ◄─ global values, as they are when a quorum is there (server/round_state.py)

The outer optimizer is SGD, whose steps are linear: the steps of all ranks with their shares of the mean change add up
to the step with the mean change, momentum included. So servers have nothing to keep but the values, as in asynchronous
training, and lose nothing: see server/accumulators.py. The training thread calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from byteps_py import rank_bits
from byteps_py.errors import NonFiniteError, UsageError
from byteps_py.tensors import NonFinite
from byteps_py.torch.collectives import context as contexts, nonfinite
from byteps_py.torch.gradients.shared_values import SharedValues
from byteps_py.torch.local.diloco import DiLoCo, Fragment, Streaming, whole_number

__all__ = ["DecoupledDiLoCo"]


class DecoupledDiLoCo(DiLoCo):
    """DiLoCo in which a slow machine holds up no other one.

    Every ``every`` steps a machine sends its change, and goes on with the global values once a quorum of machines has
    sent theirs and those that are usually in time have had the time: until the median of the latest arrivals, and four
    of their median absolute deviations. A machine that comes later gets the values at once; its change counts then, and
    is never lost. Machines may make different numbers of steps in the same time.

    model, inner, every, streaming: see DiLoCo. With a ``delay`` of some steps no machine waits at all.
    outer: torch.optim.SGD without weight decay, or None: see DiLoCo. Each rank's momentum is its share of the whole.
    quorum: how many machines are combined at least; all, if there are fewer. The ranks of a machine step together.

    At the end of training all ranks call ``synchronize``, whatever number of steps they have made. Which machines are
    combined depends on their speed, so results differ from run to run, and `bps replay` repeats them. Changes and
    values travel without compression. Raises UsageError, and ``step`` also what DiLoCo's raises; NonFiniteError only on
    the rank whose change is not finite.

    >>> import torch, byteps_py as bps
    >>> bps.init()
    >>> model = torch.nn.Linear(2, 1)
    >>> inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    >>> optimizer = bps.local.DecoupledDiLoCo(model, inner, every=10, quorum=3)
    >>> for _ in range(20):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    >>> optimizer.synchronize()
    >>> bps.shutdown()
    """

    _outer_is_common = False

    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        outer: torch.optim.Optimizer | None = None,
        *,
        every: int,
        quorum: int,
        streaming: Streaming = Streaming(),  # noqa: B008  frozen
    ) -> None:
        quorum = whole_number("quorum", quorum, 1)
        if outer is not None and (type(outer) is not torch.optim.SGD or _has_decay(outer)):
            raise UsageError(
                "DecoupledDiLoCo: the outer optimizer is torch.optim.SGD without weight_decay: machines make its steps "
                "with their own changes, and only such steps add up to one with the mean change"
            )
        super().__init__(model, inner, outer, every=every, streaming=streaming)
        context = contexts.current()
        self._shared = {
            fragment.name: SharedValues(context, fragment.name, quorum=quorum) for fragment in self._fragments
        }
        self._sent: set[str] = set()  # names of the fragments whose values are under way

    def _begin_anew(self) -> None:
        """With the global values of this rank, which all ranks have, at the next exchange."""
        self._sent.clear()
        for shared in self._shared.values():
            shared.restart()

    def synchronize(self) -> None:
        """Combine all ranks, however many steps they have made; all then have the global parameters. All ranks call it:
        at the end of training, or before the model is saved.

        A rank goes on taking part, without changes, until it has heard that all ranks have sent their last ones; so
        those that are slower still find a quorum. Then it joins: nobody waits for it any more.
        """
        for fragment in self._fragments:
            self._finish(fragment, self._alpha)
        for fragment in self._fragments:
            self._send(fragment)
        for fragment in self._fragments:
            self._finish(fragment, alpha=0.0)
        context = contexts.current()
        self._take_part(is_last=True)
        while any(shared.finished < context.session.size for shared in self._shared.values()):
            self._take_part()
        self._take_part()  # not all of the last values may have been newer than the last changes
        for fragment in self._fragments:
            for copy in fragment.copies:
                copy.give_values()
        context.join()
        self._begin_anew()

    def _take_part(self, is_last: bool = False) -> None:
        """In an exchange, without a change."""
        for shared in self._shared.values():
            for copy in shared.copies:
                copy.change.zero_()
            shared.give(is_last)
        for shared in self._shared.values():
            shared.take()

    def rejoin(self) -> None:
        """See DiLoCo.rejoin. Each rank keeps its share of the outer momentum."""
        super().rejoin()
        self._begin_anew()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``, which may be each rank's own. All ranks call it, to agree on global values. The
        model's parameters are loaded by the caller."""
        super().load_state_dict(state)
        self.rejoin()

    def _made(self) -> tuple[int, int]:
        return sum(shared.changes for shared in self._shared.values()), self.steps

    def _send(self, fragment: Fragment) -> None:
        """Send what the outer step changes with this rank's share of the mean change."""
        fragment.sent_at = self.steps
        before = [copy.values.detach().clone() for copy in fragment.copies]
        for copy in fragment.copies:
            copy.take_change()
        self._check_own(fragment)
        for copy in fragment.copies:
            copy.change.div_(contexts.current().session.size)
        self._outer_step(fragment)
        for copy, values in zip(fragment.copies, before, strict=True):
            torch.sub(copy.values.detach(), values, out=copy.change)
            copy.values.detach().copy_(values)
        shared = self._shared[fragment.name]
        if not shared.copies:
            shared.start(fragment.copies)
        shared.give()
        self._sent.add(fragment.name)

    def _receive(self, fragment: Fragment) -> None:
        """The global values with the change that was sent."""
        if fragment.name in self._sent:
            self._shared[fragment.name].take()
            self._sent.remove(fragment.name)
            fragment.has_values = True
            fragment.outer_steps += 1

    def _check_own(self, fragment: Fragment) -> None:
        """Raises NonFiniteError on this rank alone, which then gives nothing."""
        context = contexts.current()
        if nonfinite.mode_of(context) is not NonFinite.RAISE:
            return
        places = [
            place
            for copy in fragment.copies
            for name, change in zip(copy.names, copy.changes, strict=True)
            if not nonfinite.is_finite(change) and (place := nonfinite.where(name, change)) is not None
        ]
        if places:
            session = context.session
            who = rank_bits.text(rank_bits.of_rank(session.rank, session.size), session.size)
            raise NonFiniteError(
                f"NaN or infinity from {who}, step {self.steps}: in the changes that DecoupledDiLoCo combines of "
                f"{nonfinite.listed(places)}; look at the batches and the losses there. BYTEPS_NONFINITE=allow lets "
                "the values pass"
            )


def _has_decay(outer: torch.optim.Optimizer) -> bool:
    return any(group.get("weight_decay") for group in outer.param_groups)
