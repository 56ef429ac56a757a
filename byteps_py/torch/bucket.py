"""Gradients that are one tensor to the service: their state in a round, how they leave and how they come back.

Owns one bucket's memory of the current round. Must not know other buckets, optimizers or hooks. Whoever calls holds
the lock of the GradientReducer (buckets.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from byteps_py.errors import GradientOrderError
from byteps_py.tensors import NonFinite
from byteps_py.torch.compression import Compression, Compressor
from byteps_py.torch.context import Request
from byteps_py.torch.dtypes import check_dense
from byteps_py.torch.exchange import Exchange
from byteps_py.torch.ops import Average, ReduceOp


@dataclass(frozen=True, slots=True)
class Scheme:
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


class Place:
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
        self, request: Request, names: list[str], params: list[torch.nn.Parameter], scheme: Scheme, first: int
    ) -> None:
        self.request = request
        self.names = names
        self.params = params
        self.scheme = scheme
        self.first = first
        self.exchange: Exchange | None = None
        self.reset()

    def reset(self) -> None:
        """Before the first gradient of a round."""
        self.seen = [False] * len(self.params)
        self.missing = -1  # counted when the first one comes: requires_grad may change between rounds
        self.sent = False
        self.kinds: Exchange | None = None  # what is sent instead if gradients turn out to be sparse: which ones
        self.takes_part = [False] * len(self.params)  # known once sent: requires_grad may change after that, too
        self.snapshot: list[tuple[torch.Tensor, int] | None] = [None] * len(self.params)  # final gradient, version

    def mark(self, position: int) -> bool:
        """Note that a gradient is final; True if it was the last one of the bucket."""
        if self.missing < 0:
            self.missing = sum(param.requires_grad for param in self.params)
        self.seen[position] = True
        param = self.params[position]
        grad = param.grad
        if grad is not None:
            if self.scheme.sparse_as_dense and grad.layout is not torch.strided:
                grad = param.grad = grad.to_dense()
            self.snapshot[position] = grad, grad._version
        self.missing -= 1
        return self.missing <= 0

    def gradients(self, sparse: bool = False) -> list[torch.Tensor | None]:
        """What to hand over: None (zeros) for unused parameters without a gradient, and for frozen ones.

        Raises UsageError for a gradient that has no values, and, but if ``sparse``, for one that is not dense.
        """
        self.takes_part = [seen or param.requires_grad for param, seen in zip(self.params, self.seen, strict=True)]
        found: list[torch.Tensor | None] = []
        for param, takes_part, name in zip(self.params, self.takes_part, self.names, strict=True):
            grad = param.grad if takes_part else None
            if grad is not None and (grad.is_meta or (grad.layout is not torch.strided and not sparse)):
                check_dense(grad, name)  # raises
            found.append(grad)
        return found

    def hand_over(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send what ``gradients`` gave; nothing to do if it does not travel."""
        if self.exchange is None:
            return
        factor = self.scheme.predivide
        if factor != 1.0:
            gradients = [None if grad is None else grad.detach() / factor for grad in gradients]
        self.exchange.send(gradients)

    def take_over(self, other: Bucket, positions: Sequence[int]) -> None:
        """Go on with the round of ``other`` for its gradients at ``positions``, which are this bucket's."""
        self.seen = [other.seen[i] for i in positions]
        self.snapshot = [other.snapshot[i] for i in positions]
        self.missing = 0

    @property
    def changed(self) -> str | None:
        """The parameter whose gradient was touched after it was final, if any."""
        for name, param, was in zip(self.names, self.params, self.snapshot, strict=True):
            if was is not None and (param.grad is not was[0] or was[0]._version != was[1]):
                return name
        return None

    @property
    def wanted(self) -> bool:
        """False if all its parameters are frozen: it takes no part in the round."""
        return any(self.seen) or any(param.requires_grad for param in self.params)

    @property
    def round(self) -> int:
        """The number of its round, from 1; 0 if it does not travel."""
        return self.exchange.slot.round if self.exchange is not None else 0

    @property
    def blame(self) -> int:
        """Who has made its result NaN or infinite, see blame.py; 0: nobody, or nobody asks."""
        return self.exchange.slot.blame if self.exchange is not None else 0

    def travel(self) -> None:
        """Take what other ranks must say before the gradients can leave: nothing, if these are dense."""

    def receive(self) -> None:
        """Wait for the result and put it into ``param.grad``. Raises as ``wait`` does, and GradientOrderError."""
        if self.exchange is not None:
            self.exchange.wait()
        self.check_untouched()
        self.deliver()

    def check_untouched(self) -> None:
        """Raises GradientOrderError if a gradient was changed while it was on its way."""
        touched = self.changed
        if touched is not None:
            raise GradientOrderError(
                f"the gradient of {touched!r} was changed after backward() and before synchronize(): the change would "
                "be lost. Call optimizer.synchronize() first, then clip or unscale, then step() inside "
                "optimizer.skip_synchronize()"
            )

    def deliver(self) -> None:
        """Put the result, which is there, into ``param.grad``; nothing to do if it did not travel."""
        exchange = self.exchange
        if exchange is None:
            return
        copied: list[int] = []
        outputs: list[torch.Tensor] = []
        results: list[torch.Tensor] = []
        for position, (param, takes_part) in enumerate(zip(self.params, self.takes_part, strict=True)):
            if not takes_part:
                continue  # frozen: must stay without a gradient
            view = exchange.results[position]
            if view.dtype == param.dtype and view.device == param.device:
                if param.grad is not view:
                    param.grad = view
            else:
                if param.grad is None or param.grad.layout is not torch.strided:
                    param.grad = torch.empty_like(param)
                copied.append(position)
                outputs.append(param.grad)
            results.append(param.grad)
        exchange.fetch(outputs, copied)
        after = self.scheme.after(exchange.session.size)
        if after != 1.0 and results:
            with torch.no_grad():
                torch._foreach_mul_(results, after)
