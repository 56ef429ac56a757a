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
from byteps_py.torch.compression import Compression, Compressor, codec_for, compression_of
from byteps_py.torch.gradients.shared_values import SharedValues, copy_dtype
from byteps_py.torch.local.diloco import DiLoCo, Fragment, Streaming, whole_number
from byteps_py.torch.operations.handles import synchronize
from byteps_py.torch.operations.reductions import ReductionOptions, Sum, start_reduction

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
    compression: of what machines send, one of bps.Compression with a codec that draws nothing: int8, float8,
    topk(0.03, bits=2), onebit. A machine gets the codes of the changes that it lacks, also those of other machines, or
    the values where these are shorter; so all copies have the same bits. topk has error feedback in any case.

    At the end of training all ranks call ``synchronize``, whatever number of steps they have made. Which machines are
    combined depends on their speed, so results differ from run to run, and `bps replay` repeats them. Raises
    UsageError, and ``step`` also what DiLoCo's raises; NonFiniteError only on the rank whose change is not finite.

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
        compression: type[Compressor] | Mapping[str, Any] = Compression.none,
    ) -> None:
        coded = _of_machines(compression)
        quorum = whole_number("quorum", quorum, 1)
        if outer is not None and (type(outer) is not torch.optim.SGD or _has_decay(outer)):
            raise UsageError(
                "DecoupledDiLoCo: the outer optimizer is torch.optim.SGD without weight_decay: machines make its steps "
                "with their own changes, and only such steps add up to one with the mean change"
            )
        context = contexts.current()
        for name, param in model.named_parameters():
            if param.requires_grad:
                codec_for(coded, copy_dtype(param), 0, name, context.settings)
        super().__init__(model, inner, outer, every=every, streaming=streaming)
        self._coded = coded
        self._shared = {
            fragment.name: SharedValues(context, fragment.name, quorum=quorum, compression=coded)
            for fragment in self._fragments
        }
        self._sent: set[str] = set()  # names of the fragments whose values are under way
        #: By fragment: what was not sent when its state was saved, or its group ended, to be sent with the next change.
        self._owed: dict[str, list[torch.Tensor | None]] = {}
        #: In an elastic job, by fragment: the same for its next group, as of the last exchange that is over.
        self._unsent_before: dict[str, list[torch.Tensor | None]] = {}

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
        unsent = [self._unsent(fragment, is_taken=True) for fragment in self._fragments]
        context = contexts.current()
        self._take_part(is_last=True)
        while any(shared.finished < context.session.size for shared in self._shared.values()):
            self._take_part()
        self._take_part()  # not all of the last values may have been newer than the last changes
        self._send_the_rest(unsent)
        self._unsent_before.clear()
        for fragment in self._fragments:
            for copy in fragment.copies:
                copy.give_values()
        context.join()
        self._begin_anew()

    def _send_the_rest(self, unsent: Sequence[Sequence[torch.Tensor | None]]) -> None:
        """Sum the parts of changes that machines have not sent yet, without a codec."""
        if self._coded.codec is None or not self._coded.codec.error_feedback:
            return
        for fragment, errors in zip(self._fragments, unsent, strict=True):
            for index, (copy, error) in enumerate(zip(fragment.copies, errors, strict=True)):
                rest = torch.zeros_like(copy.change) if error is None else error
                name = f"{fragment.name}.{index}.unsent"
                synchronize(start_reduction([rest], [rest], name, ReductionOptions(Sum, "DiLoCo")))
                copy.values.detach().add_(rest)

    def _unsent(self, fragment: Fragment, is_taken: bool = False) -> list[torch.Tensor | None]:
        shared = self._shared[fragment.name]
        return shared.unsent(is_taken) if shared.copies else [None] * len(fragment.copies)

    def _take_part(self, is_last: bool = False) -> None:
        """In an exchange, without a change."""
        for shared in self._shared.values():
            for copy in shared.copies:
                copy.change.zero_()
            shared.give(is_last)
        for shared in self._shared.values():
            shared.take()

    def rejoin(self) -> None:
        """See DiLoCo.rejoin. Each rank keeps its share of the outer momentum. With error feedback, what machines had
        not sent yet is sent with their next changes, but for that of a machine whose first rank was lost."""
        super().rejoin()
        for fragment in self._fragments:
            self._unsent(fragment, is_taken=True)  # a tensor of the same name would go on with it
        self._owed |= {name: errors for name, errors in self._unsent_before.items() if _has_any(errors)}
        self._begin_anew()
        for fragment in self._fragments:  # which takes long on slow links, and travels under the next inner steps
            self._shared[fragment.name].start(fragment.copies)
            self._shared[fragment.name].begin()

    def state_dict(self) -> dict[str, Any]:
        """See DiLoCo.state_dict. With error feedback, it has what this rank's machine has not sent yet."""
        state = super().state_dict()
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            saved["unsent"] = self._owed.get(fragment.name) or self._unsent(fragment)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``, which may be each rank's own. All ranks call it, to agree on global values. The
        model's parameters are loaded by the caller."""
        super().load_state_dict(state)
        self.rejoin()
        unsent = {
            fragment.name: list(saved.get("unsent", ()))
            for fragment, saved in zip(self._fragments, state["fragments"], strict=True)
        }
        self._owed = {name: errors for name, errors in unsent.items() if _has_any(errors)}
        self._unsent_before = dict(self._owed)

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
        for copy, owed in zip(fragment.copies, self._owed.pop(fragment.name, ()), strict=False):
            if owed is not None:  # it stays in ``_unsent_before`` until it was sent
                copy.change.add_(owed.to(copy.change.device))
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
            if contexts.current().settings.elastic:
                self._unsent_before[fragment.name] = self._unsent(fragment)

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


def _of_machines(choice: Any) -> type[Compressor]:
    """The compression of what machines give. Raises UsageError."""
    chosen = compression_of(choice)
    if chosen is Compression.none:
        return chosen
    codec = chosen.codec
    if codec is None or codec.draws or codec.is_thc:
        raise UsageError(
            f"DecoupledDiLoCo: compression {chosen.__name__} is not for changes that machines send at different times: "
            "values are kept in float32, and machines neither draw together nor agree on steps. Give "
            "bps.Compression.int8, float8, topk or onebit"
        )
    if codec.momentum:
        raise UsageError(
            f"DecoupledDiLoCo: {chosen.__name__} has momentum, and so has the outer optimizer: leave out the "
            "compression's"
        )
    return Compression.with_error_feedback(chosen) if codec.leaves_out else chosen


def _has_any(errors: Sequence[torch.Tensor | None]) -> bool:
    return any(each is not None for each in errors)


def _has_decay(outer: torch.optim.Optimizer) -> bool:
    return any(group.get("weight_decay") for group in outer.param_groups)
