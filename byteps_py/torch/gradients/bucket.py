"""Gradients that are one tensor to the service: their state in a round, how they leave and how they come back.

Owns one bucket's memory of the current round. Must not know other buckets, optimizers or hooks. Whoever calls holds
the lock of the GradientReducer (buckets.py), unless a method says otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from byteps_py.errors import GradientOrderError
from byteps_py.tensors import NonFinite
from byteps_py.torch.compression import Compression, Compressor
from byteps_py.torch.engine.dtypes import check_dense
from byteps_py.torch.engine.slot_view import PieceView, TensorRequest
from byteps_py.torch.gradients.gradient_checksums import GradientChecksums, Gradients, Scratch
from byteps_py.torch.horovod.ops import Average, ReduceOp


@dataclass(frozen=True, slots=True)
class GradientOptions:
    """How gradients are combined.

    predivide: an average's factor f: gradients are divided by f before the sum and multiplied by f/size after it.
    group: the ranks among which they are combined; empty for all. prefix: of their names.
    nonfinite: what to do about NaN and infinity in gradients.
    """

    compression: type[Compressor] = Compression.none
    op: ReduceOp = Average
    predivide: float = 1.0
    group: tuple[int, ...] = ()
    prefix: str = "Gradient."
    sparse_as_dense: bool = False
    nonfinite: NonFinite = NonFinite.ALLOW

    @property
    def divides(self) -> bool:
        """The service divides the sum; else ``after`` does, if it is an average."""
        return self.op is Average and self.predivide == 1.0

    def members(self, size: int) -> int:
        return len(self.group) or size

    def after(self, size: int) -> float:
        """What to multiply a result with."""
        return 1.0 if self.predivide == 1.0 else self.predivide / self.members(size)


class GradientPlace:
    """Where a parameter's gradient travels. Looked up once: a parameter is slow to hash."""

    __slots__ = ("bucket", "position")

    def __init__(self, bucket: Bucket, position: int) -> None:
        self.bucket = bucket
        self.position = position


class Bucket:
    """Gradients that are one tensor to the service. Its state is that of the current round.

    ``first``: the place of its first parameter in the order of the forward pass.
    """

    def __init__(
        self,
        request: TensorRequest,
        names: list[str],
        params: list[torch.nn.Parameter],
        options: GradientOptions,
        first: int,
        scratch: Scratch,
    ) -> None:
        self.request = request
        self.names = names
        self.params = params
        self.options = options
        self.first = first
        self.slot_view: PieceView | None = None
        self._checksums = GradientChecksums(scratch, self._contribution)
        self._own: dict[int, torch.Tensor] = {}  # by position: see ``_clear_results``
        self.reset()

    def reset(self) -> None:
        """Before the first gradient of a round."""
        self.arrived: list[int] = []  # positions of gradients, as they are computed
        # How many there will be. Counted when the first one comes: requires_grad may change before.
        self.due = 0
        self.sent = False
        self.kinds: PieceView | None = None  # what is sent instead if gradients turn out to be sparse: which ones
        self.takes_part = [False] * len(self.params)  # known once collected: requires_grad may change after that, too
        self.final: list[torch.Tensor | None] = [None] * len(self.params)  # gradients that must not change any more
        self.versions = [0] * len(self.params)  # theirs
        self._checksums.reset()

    def mark(self, position: int, grad: torch.Tensor | None) -> bool:
        """A gradient was computed. True if it is time to look whether the bucket ``is_complete``. Without the lock."""
        if grad is not None and not self.sent:
            self.final[position], self.versions[position] = grad, grad._version
        self.arrived.append(position)
        return len(self.arrived) >= self.due

    def is_complete(self, passes: int) -> bool:
        """Every gradient has been computed ``passes`` times, if none was too often."""
        if not self.due:
            self.due = passes * max(1, sum(param.requires_grad for param in self.params))
        return len(self.arrived) >= self.due

    def recount(self, passes: int) -> str | None:
        """Gradients that were computed less than ``passes`` times are not final: they may be changed. Returns the name
        of one that was computed more often."""
        for position, count in Counter(self.arrived).items():
            if count > passes:
                return self.names[position]
            if count < passes:
                self.final[position] = None
        return None

    def collect(self, sparse: bool = False) -> list[torch.Tensor | None]:
        """What to hand over: None (zeros) for unused parameters without a gradient, and for frozen ones.

        Raises UsageError for a gradient that has no values, and, but if ``sparse``, for one that is not dense.
        """
        self.takes_part = [param.requires_grad for param in self.params]
        for position in self.arrived:
            self.takes_part[position] = True
        found = [p.grad if takes_part else None for p, takes_part in zip(self.params, self.takes_part, strict=True)]
        for position, grad in enumerate(found):
            if grad is not None and (grad.layout is not torch.strided or grad.is_meta):
                if self.options.sparse_as_dense and not grad.is_meta:
                    found[position] = self._make_dense(position, grad)
                elif grad.is_meta or not sparse:
                    check_dense(grad, self.names[position])  # raises
        return found

    def _make_dense(self, position: int, grad: torch.Tensor) -> torch.Tensor:
        dense = self.params[position].grad = grad.to_dense()
        if self.final[position] is grad and self.versions[position] == grad._version:
            self.final[position], self.versions[position] = dense, dense._version
        return dense

    def hand_over(self, gradients: Sequence[torch.Tensor | None], is_early: bool = False) -> None:
        """Send what ``collect`` gave; nothing to do if it does not travel. ``is_early``: the training goes on, and may
        change gradients, before they are waited for."""
        if self.slot_view is None:
            return
        if is_early:
            self._checksums.send(self.slot_view, self._clear_results(self.slot_view, gradients))
        else:
            self.slot_view.contribute(self._contribution(gradients))

    def _contribution(self, gradients: Gradients) -> Gradients:
        factor = self.options.predivide
        return gradients if factor == 1.0 else [None if grad is None else grad.detach() / factor for grad in gradients]

    def _clear_results(self, slot_view: PieceView, gradients: Gradients) -> Gradients:
        """Gradients may lie where their results will (zero_grad(set_to_none=False) leaves them there): the training
        would see one or the other, and what it changed would change a result. So they get memory of their own."""
        given = list(gradients)
        for position, (grad, address) in enumerate(zip(gradients, slot_view.result_addresses, strict=True)):
            if grad is not None and grad.data_ptr() == address and grad.numel():
                own = self._own.get(position)
                if own is None:
                    own = self._own[position] = torch.empty_like(grad, requires_grad=False)
                own.copy_(grad.detach())
                if self.final[position] is grad and self.versions[position] == grad._version:
                    self.final[position], self.versions[position] = own, own._version
                given[position] = self.params[position].grad = own
        return given

    def described(self, position: int) -> str:
        """A parameter, for ranks that compare what they combine. Shapes only where the service does not see them."""
        param, shape = self.params[position], ""
        if len(self.params) > 1:
            shape = f" {str(param.dtype).removeprefix('torch.')}{list(param.shape)}"
        return f"{self.names[position]!r}{shape}"

    def set_terms(self, terms: str) -> None:
        """What ranks must agree on besides, before its next round: they do so anew."""
        self.request = replace(self.request, spec=replace(self.request.spec, terms=terms))
        self.slot_view = None

    def leave_results(self) -> None:
        """Memory of a slot is the service's once its name is declared anew: no gradient may lie there then."""
        if self.slot_view is not None:
            for param, address in zip(self.params, self.slot_view.result_addresses, strict=True):
                if param.grad is not None and param.grad.data_ptr() == address:
                    param.grad = param.grad.detach().clone()

    def take_over(self, other: Bucket, positions: Sequence[int]) -> None:
        """Go on with the round of ``other`` for its gradients at ``positions``, which are this bucket's."""
        self.arrived = [i for i, position in enumerate(positions) if other.takes_part[position]]
        self.final = [other.final[i] for i in positions]
        self.versions = [other.versions[i] for i in positions]

    @property
    def changed(self) -> str | None:
        """The parameter whose gradient was touched after it was final, if any."""
        for position, (param, final, version) in enumerate(zip(self.params, self.final, self.versions, strict=True)):
            if final is not None and (param.grad is not final or final._version != version):
                return self.names[position]
        found = [p.grad if takes_part else None for p, takes_part in zip(self.params, self.takes_part, strict=True)]
        changed = self._checksums.changed(found)
        return None if changed is None else self.names[changed]

    @property
    def wanted(self) -> bool:
        """False if all its parameters are frozen: it takes no part in the round."""
        return bool(self.arrived) or any(param.requires_grad for param in self.params)

    @property
    def round(self) -> int:
        """The number of its round, from 1; 0 if it does not travel."""
        return self.slot_view.slot.round if self.slot_view is not None else 0

    @property
    def blame(self) -> int:
        """Who has made its result NaN or infinite, see blame.py; 0: nobody, or nobody asks."""
        return self.slot_view.slot.blame if self.slot_view is not None else 0

    def travel(self) -> None:
        """Take what other ranks must say before the gradients can leave: nothing, if these are dense."""

    def receive(self) -> None:
        """Wait for the result and put it into ``param.grad``. Raises as ``wait`` does, and GradientOrderError."""
        touched = self.changed  # while the result is on its way
        if self.slot_view is not None:
            self.slot_view.wait()
        self._check_untouched(touched)
        self.deliver()

    def check_untouched(self) -> None:
        """Raises GradientOrderError if a gradient was changed while it was on its way."""
        self._check_untouched(self.changed)

    @staticmethod
    def _check_untouched(touched: str | None) -> None:
        if touched is not None:
            raise GradientOrderError(
                f"the gradient of {touched!r} was changed after backward() and before synchronize(): the change would "
                "be lost. Call optimizer.synchronize() first, then clip or unscale, then step() inside "
                "optimizer.skip_synchronize()"
            )

    def deliver(self) -> None:
        """Put the result, which is there, into ``param.grad``; nothing to do if it did not travel."""
        slot_view = self.slot_view
        if slot_view is None:
            return
        copied: list[int] = []
        outputs: list[torch.Tensor] = []
        given: list[torch.Tensor] = []
        for position, (param, takes_part) in enumerate(zip(self.params, self.takes_part, strict=True)):
            if not takes_part:
                continue  # frozen: must stay without a gradient
            grad = slot_view.results[position]
            if param.dtype is slot_view.dtype and param.is_cpu:
                param.grad = grad
            else:
                if param.grad is None or param.grad.layout is not torch.strided:
                    param.grad = torch.empty_like(param)
                grad = param.grad
                copied.append(position)
                outputs.append(grad)
            given.append(grad)
        slot_view.fetch(outputs, copied)
        after = self.options.after(slot_view.session.size)
        if after != 1.0 and given:
            with torch.no_grad():
                torch._foreach_mul_(given, after)
