"""Compares ranks' plans: whether all ranks combine the same gradients, broadcast the same tensors, and call closures
equally often.

Tensors are matched by name, so ranks that group gradients differently, or have other parameters, would wait for each
other until the stall limit. Therefore ranks compare plans by two numbers first, and entry by entry if those differ.
Does not own the plans that it compares. The caller holds a lock; ``begin`` does not wait for other ranks.

    backward: gradients are sent
    step → begin → finish: plans are equal, or MismatchError on every rank

Comparisons have a name that says nothing of the parameters. Those of optimizers are numbered: the nth optimizer of a
rank that makes a step is compared with the nth of the other ranks. An optimizer that a rank never uses does not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from byteps_py.errors import MismatchError
from byteps_py.tensors import FIRST_STEP, DType, Op, TensorSpec
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.slot_view import PieceView, TensorRequest

#: For each gradient, in the order of named_parameters: (name of its bucket's tensor, description of the gradient). Of
#: other tensors: ("", description).
Plan = Sequence[tuple[str, str]]

_TEXT_BYTES = 512  # the longest text of an entry that is exchanged
_ENDED = 1 << 40  # more than any number of evaluations


class PlanComparison:
    """Comparisons of ``subject`` among the ranks of ``group`` (empty: all). ``advice``: the end of the error.
    ``is_numbered``: see above."""

    def __init__(
        self, context: Context, subject: str, advice: str, group: tuple[int, ...] = (), is_numbered: bool = True
    ) -> None:
        self._context, self._subject, self._advice, self._group = context, subject, advice, group
        self._is_numbered = is_numbered
        among = f" among {hashlib.blake2b(repr(group).encode(), digest_size=8).hexdigest()}" if group else ""
        #: The values that are compared with each other, in order: comparisons of one subject among the same ranks.
        self.kind = f"{subject}{among}"
        self._name = ""  # known with the first exchange
        self._under_way: PieceView | None = None
        #: True between ``begin`` and ``finish``.
        self.is_under_way = False

    def begin(self, plan: Plan) -> None:
        """Send a digest of this rank's plan. Has no effect if called again before ``finish``."""
        if self._under_way is None:
            self.is_under_way = True
            number = _number("\n".join(map(_entry, plan)))
            self._under_way = self._start("plan", torch.tensor([number, -number], device="cpu"))

    def finish(self, plan: Plan) -> None:
        """Wait for the other ranks' digests. Raises MismatchError, with the first difference, if plans differ."""
        self.is_under_way = False
        slot_view, self._under_way = self._under_way, None
        if slot_view is None:
            return
        slot_view.wait()
        largest, smallest = slot_view.results[0].tolist()
        if largest != -smallest:
            raise MismatchError(self._difference(plan))

    def compare(self, plan: Plan) -> None:
        """``begin`` and ``finish``."""
        self.begin(plan)
        self.finish(plan)

    def forget(self) -> None:
        """Discard a comparison that began in another job."""
        self._under_way, self._name = None, ""
        self.is_under_way = False

    def check_closure_calls(self, evaluations: int | None) -> None:
        """Check that all ranks have called their closure ``evaluations`` times in this step; None: have ended the step.

        Raises MismatchError if some have not.
        """
        found = self._values_by_rank(_ENDED if evaluations is None else evaluations)
        if len(set(found.values())) > 1:
            where = "; ".join(
                f"rank {rank} {'has ended its step' if at == _ENDED else f'evaluates it for time {at}'}"
                for rank, at in list(found.items())[:8]
            )
            raise MismatchError(
                f"ranks evaluate the closure of optimizer.step() a different number of times: {where}. An optimizer "
                "that depends on the loss must get the same loss on all ranks: return push_pull(loss.detach()) from "
                "the closure"
            )

    # ---- exchanges -------------------------------------------------------------------------------------

    @property
    def _ranks(self) -> Sequence[int]:
        return self._group or range(self._context.session.size)

    def _difference(self, plan: Plan) -> str:
        (length,) = self._max("length", torch.tensor([len(plan)], device="cpu")).tolist()
        numbers = torch.tensor([_number(_entry(each)) for each in plan] + [0] * (length - len(plan)), device="cpu")
        largest = self._max(f"entries of {length}", torch.cat([numbers, -numbers]))
        at = int((largest[:length] != -largest[length:]).nonzero()[0])
        texts = torch.zeros(len(self._ranks), _TEXT_BYTES, dtype=torch.uint8, device="cpu")
        mine = (_entry(plan[at]) if at < len(plan) else "nothing").encode()[:_TEXT_BYTES]
        texts[self._ranks.index(self._context.session.rank), : len(mine)] = torch.frombuffer(
            bytearray(mine), dtype=torch.uint8
        )
        ranks_by_text: dict[str, list[int]] = {}
        for rank, row in zip(self._ranks, self._max("entry", texts), strict=True):
            text = row.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
            if text:
                ranks_by_text.setdefault(text, []).append(rank)
        each = "; ".join(f"{_named(ranks)} gave {text}" for text, ranks in ranks_by_text.items())
        here = f" ({plan[at][0]!r} here)" if at < len(plan) and plan[at][0] else ""
        return f"ranks disagree about the {self._subject}, first at number {at}{here}: {each}. {self._advice}"

    def _values_by_rank(self, mine: int) -> dict[int, int]:
        """Each rank's value, which is above 0. Ranks that have called join() are missing."""
        values = torch.zeros(len(self._ranks), dtype=torch.int64, device="cpu")
        values[self._ranks.index(self._context.session.rank)] = mine
        found = self._max("closure", values).tolist()
        return {rank: value for rank, value in zip(self._ranks, found, strict=True) if value}

    def _max(self, what: str, values: torch.Tensor) -> torch.Tensor:
        slot_view = self._start(what, values)
        slot_view.wait()
        return slot_view.results[0].clone()

    def _start(self, what: str, values: torch.Tensor) -> PieceView:
        wire = DType.INT64 if values.dtype is torch.int64 else DType.UINT8
        (slot_view,) = self._context.slot_views([self._request(what, wire, tuple(values.shape))])
        slot_view.contribute([values])
        return slot_view

    def _new_name(self) -> str:
        return f"{self.kind}{FIRST_STEP}{self._context.number_of_next(self.kind)}" if self._is_numbered else self.kind

    def _request(self, what: str, wire: DType, shape: tuple[int, ...]) -> TensorRequest:
        self._name = self._name or self._new_name()
        spec = TensorSpec(f"{self._name}.{what}", wire, shape, Op.MAX, group=self._group)
        dtype = torch.int64 if wire is DType.INT64 else torch.uint8
        return TensorRequest(spec, dtype, (shape,), torch.device("cpu"))


def _entry(entry: tuple[str, str]) -> str:
    tensor, text = entry
    return f"{text} in {tensor!r}" if tensor else text


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2 | 1


def _named(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + ("…" if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
