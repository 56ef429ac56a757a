"""Gradients on their way: from "this one is final" to "all of them are averaged", bucket by bucket.

Owns which gradients of a round were handed over. Must not know optimizers, hooks or accumulation: those are
in optimizer.py and parallel.py, which share this. Autograd's threads call ``ready`` (one at a time per
device, hence the lock), the training thread calls ``finish``.

    hook → ready(place) ─ last of its bucket → copy into the slot, hand over ─┐
    step → finish()  ─ the rest of the buckets, zeros for unused ─────────┴→ wait → p.grad = view of the result
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Sequence

import torch

from byteps_py.errors import GradientOrderError
from byteps_py.session import Session
from byteps_py.tensors import TensorSpec
from byteps_py.torch.compression import Compressor
from byteps_py.torch.context import Context, Request
from byteps_py.torch.dtypes import check_dense, wire_dtype
from byteps_py.torch.exchange import Exchange
from byteps_py.torch.layout import plan_buckets


class Place:
    """Where a parameter's gradient travels. Looked up once: a parameter is slow to hash."""

    __slots__ = ("bucket", "position")

    def __init__(self, bucket: Bucket, position: int) -> None:
        self.bucket = bucket
        self.position = position


class Bucket:
    """Gradients that are one tensor to the service. Its state is that of the current round."""

    def __init__(self, request: Request, names: list[str], params: list[torch.nn.Parameter]) -> None:
        self.request = request
        self.names = names
        self.params = params
        self.exchange: Exchange | None = None
        self.reset()

    def reset(self) -> None:
        """Before the first gradient of a round."""
        self.seen = [False] * len(self.params)
        self.missing = -1  # counted when the first one comes: requires_grad may change between rounds
        self.sent = False
        self.takes_part = [False] * len(self.params)  # known once sent: requires_grad may change after that, too
        self.snapshot: list[tuple[torch.Tensor, int] | None] = [None] * len(self.params)  # final gradient, version

    def mark(self, position: int) -> bool:
        """Note that a gradient is final; True if it was the last one of the bucket."""
        if self.missing < 0:
            self.missing = sum(param.requires_grad for param in self.params)
        self.seen[position] = True
        grad = self.params[position].grad
        if grad is not None:
            self.snapshot[position] = grad, grad._version
        self.missing -= 1
        return self.missing <= 0

    def gradients(self) -> list[torch.Tensor | None]:
        """What to hand over: None (zeros) for unused parameters without a gradient, and for frozen ones."""
        self.takes_part = [seen or param.requires_grad for param, seen in zip(self.params, self.seen, strict=True)]
        found: list[torch.Tensor | None] = []
        for param, takes_part, name in zip(self.params, self.takes_part, self.names, strict=True):
            grad = param.grad if takes_part else None
            if grad is not None and (grad.layout is not torch.strided or grad.is_meta):
                check_dense(grad, name)  # raises
            found.append(grad)
        return found

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


class GradientReducer:
    """Averages the gradients of named parameters over all ranks, each round once.

    named: in order of the forward pass. The result replaces ``param.grad``: it is a view of the service's
    memory, valid until the gradient is handed over again, or (CUDA, compression) the gradient's own memory.
    """

    def __init__(
        self,
        context: Context,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        compression: type[Compressor],
        prefix: str = "Gradient.",
    ) -> None:
        self._context = context
        self._compression = compression
        self._prefix = prefix
        self._buckets: list[Bucket] = []
        self._places: dict[torch.nn.Parameter, Place] = {}
        self._session: Session | None = None  # the one whose slots the buckets use
        self._lock = threading.Lock()
        self.add(named)

    def add(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Take more parameters in. They come behind the earlier ones."""
        behind = len(self._places)
        dtypes = [self._compression.wire_dtype(param.dtype) for _, param in named]
        sizes = [param.numel() * dtype.itemsize for (_, param), dtype in zip(named, dtypes, strict=True)]
        kinds = [(dtype, p.device, p.requires_grad) for (_, p), dtype in zip(named, dtypes, strict=True)]
        for bucket_indices in plan_buckets(sizes, kinds, self._context.settings.fusion_bytes):
            indices = sorted(bucket_indices)
            names = [named[i][0] for i in indices]
            params = [named[i][1] for i in indices]
            shapes = tuple(tuple(param.shape) for param in params)
            count = sum(param.numel() for param in params)
            spec = TensorSpec(
                self._context.claim(self._prefix + _title(names)),
                wire_dtype(dtypes[indices[0]], names[0]),
                shapes[0] if len(shapes) == 1 else (count,),
                average=True,
                priority=-(behind + min(indices)),  # what the next forward pass needs first goes first
            )
            bucket = Bucket(Request(spec, dtypes[indices[0]], shapes, params[0].device), names, params)
            self._buckets.append(bucket)
            self._places.update((param, Place(bucket, position)) for position, param in enumerate(params))

    @property
    def begun(self) -> bool:
        """True from the first ``ready`` of a round to its ``finish``."""
        return any(bucket.sent or bucket.missing >= 0 for bucket in self._buckets)

    def place(self, param: torch.nn.Parameter) -> Place:
        """What to call ``ready`` with."""
        return self._places[param]

    def ready(self, place: Place) -> None:
        """The gradient that travels there is final for this round: it must not change before ``finish``. Never blocks
        for others."""
        bucket, position = place.bucket, place.position
        with self._lock:
            if bucket.seen[position] or bucket.sent:
                raise GradientOrderError(
                    f"the gradient of {bucket.names[position]!r} was computed again before the earlier one was "
                    "synchronized"
                )
            if bucket.mark(position):
                self._send(bucket)

    def finish(self) -> None:
        """Hand over what is left, wait for everything, and put the averages into ``param.grad``.

        Raises GradientOrderError if a gradient was touched after it was handed over, else the first error of
        the session; the round is over in either case.
        """
        errors: list[Exception] = []
        with self._lock:
            self._send_rest(errors)
            for bucket in self._buckets:  # all of them, failures or not: none may stay pending
                if bucket.sent:
                    _attempt(errors, _receive, bucket)
            for bucket in self._buckets:
                bucket.reset()
        if errors:
            raise errors[0]

    def depart(self) -> list[Bucket]:
        """The first half of ``finish``: hand over what is left. Returns the buckets on their way, in forward order.

        Each must go through ``arrive`` before its next round. Raises as ``finish`` does; then none is on its way.
        """
        errors: list[Exception] = []
        with self._lock:
            self._send_rest(errors)
            departed = [bucket for bucket in self._buckets if bucket.sent]
            for bucket in departed:
                _attempt(errors, _check_untouched, bucket)
        if errors:
            with contextlib.suppress(Exception):  # the first one is raised below
                self.finish()
            raise errors[0]
        return sorted(departed, key=lambda bucket: -bucket.request.spec.priority)

    def arrive(self, bucket: Bucket) -> None:
        """The second half of ``finish``, for one bucket: its averages into ``param.grad``. Raises its error."""
        try:
            if bucket.exchange is not None:
                bucket.exchange.wait()
                _deliver(bucket, bucket.exchange)
        finally:
            with self._lock:
                bucket.reset()

    def _send_rest(self, errors: list[Exception]) -> None:
        for bucket in self._buckets:
            if not bucket.sent and bucket.wanted:
                _attempt(errors, self._send, bucket)

    def _send(self, bucket: Bucket) -> None:
        gradients = bucket.gradients()
        if self._exchanges_needed():
            if bucket.exchange is None or not bucket.exchange.usable:
                self._declare()
            if bucket.exchange is not None:
                bucket.exchange.send(gradients)
        bucket.sent = True

    def _exchanges_needed(self) -> bool:
        session = self._context.session
        if session is not self._session:  # the first round, or the first one of another job
            self._session = session
            for bucket in self._buckets:
                bucket.exchange = None
        return session.size > 1 or self._context.settings.force_distributed

    def _declare(self) -> None:
        """Declare all buckets that take part and are not declared, in one call."""
        new = [b for b in self._buckets if b.wanted and (b.exchange is None or not b.exchange.usable)]
        for bucket, exchange in zip(new, self._context.exchanges([b.request for b in new]), strict=True):
            bucket.exchange = exchange


def _title(names: Sequence[str]) -> str:
    """A bucket's name. It stands for all members: ranks whose buckets differ must not be summed."""
    if len(names) == 1:
        return names[0]
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=4).hexdigest()
    return f"{names[0]}+{len(names) - 1} ({digest})"


def _attempt(errors: list[Exception], action: Callable[..., None], *arguments: object) -> None:
    try:
        action(*arguments)
    except Exception as error:
        errors.append(error)


def _receive(bucket: Bucket) -> None:
    exchange = bucket.exchange
    if exchange is not None:
        exchange.wait()
    _check_untouched(bucket)
    if exchange is not None:
        _deliver(bucket, exchange)


def _check_untouched(bucket: Bucket) -> None:
    touched = bucket.changed
    if touched is not None:
        raise GradientOrderError(
            f"the gradient of {touched!r} was changed after backward() and before synchronize(): the change would "
            "be lost. Call optimizer.synchronize() first, then clip or unscale, then step() inside "
            "optimizer.skip_synchronize()"
        )


def _deliver(bucket: Bucket, exchange: Exchange) -> None:
    copied: list[int] = []
    outputs: list[torch.Tensor] = []
    for position, (param, takes_part) in enumerate(zip(bucket.params, bucket.takes_part, strict=True)):
        if not takes_part:
            continue  # frozen: must stay without a gradient
        view = exchange.results[position]
        if view.dtype == param.dtype and view.device == param.device:
            if param.grad is not view:
                param.grad = view
        else:
            if param.grad is None:
                param.grad = torch.empty_like(param)
            copied.append(position)
            outputs.append(param.grad)
    exchange.fetch(outputs, copied)
