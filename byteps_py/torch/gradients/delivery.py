"""Where the sums of gradients go: into ``param.grad``, or, in hosted/delivery.py, to owners.

    GradientReducer ─ Delivery        what travels, and what may share a bucket
             Bucket ─ BucketDelivery  what is handed over, and what becomes of the sum

Must not know rounds or other buckets than its own. The caller holds the lock of the GradientReducer.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Iterator, Sequence

import torch

from byteps_py import blame as blames
from byteps_py.errors import NonFiniteError
from byteps_py.session import Session
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.collectives.slot_view import TensorRequest
from byteps_py.torch.gradients.bucket import Bucket, BucketDelivery, GradientOptions
from byteps_py.torch.gradients.gradient_checksums import Gradients


class Delivery(abc.ABC):
    """Where the sums of a GradientReducer go."""

    #: True if gradients travel even where no other rank combines them.
    always_travels: bool

    @abc.abstractmethod
    def kind_of(self, name: str, param: torch.nn.Parameter, dtype: torch.dtype) -> Hashable:
        """Gradients of different kinds must not share a bucket. ``dtype``: on the wire. Raises UsageError for a
        gradient that can't be delivered."""

    @abc.abstractmethod
    def request(self, request: TensorRequest, is_sparse: bool) -> TensorRequest:
        """What a bucket declares, from what it declares for sums that all ranks get. ``is_sparse``: of a
        SparseBucket."""

    @abc.abstractmethod
    def of_bucket(self) -> BucketDelivery:
        """That of a new bucket."""


class ToGradient(Delivery):
    """Into ``param.grad`` of all ranks."""

    always_travels = False

    def kind_of(self, name: str, param: torch.nn.Parameter, dtype: torch.dtype) -> Hashable:
        return ()

    def request(self, request: TensorRequest, is_sparse: bool) -> TensorRequest:
        return request

    def of_bucket(self) -> GradientDelivery:
        return GradientDelivery()


class GradientDelivery(BucketDelivery):
    """Into ``param.grad``: a view of the slot's result, or a copy of it."""

    untouched_until = "synchronize()"
    touched_remedy = (
        "Call optimizer.synchronize() first, then clip or unscale, then step() inside optimizer.skip_synchronize()"
    )

    def __init__(self) -> None:
        self._own: dict[int, torch.Tensor] = {}  # by position: see ``prepare``

    def prepare(self, bucket: Bucket, gradients: Gradients, is_early: bool) -> Gradients:
        """Copies gradients that share memory with their results, as zero_grad(set_to_none=False) leaves them, if the
        training goes on meanwhile. It could see either of the two otherwise, and a change of the gradient would change
        the result."""
        if not is_early or bucket.slot_view is None:
            return gradients
        given = list(gradients)
        for position, (grad, address) in enumerate(zip(gradients, bucket.slot_view.result_addresses, strict=True)):
            if grad is not None and grad.data_ptr() == address and grad.numel():
                own = self._own.get(position)
                if own is None:
                    own = self._own[position] = torch.empty_like(grad, requires_grad=False)
                own.copy_(grad.detach())
                bucket.replace_gradient(position, own)
                given[position] = own
        return given

    def receive(self, bucket: Bucket) -> None:
        touched = bucket.changed  # checked while the result is in flight
        if bucket.slot_view is not None:
            bucket.slot_view.wait()
        bucket.refuse_change(touched)
        deliver(bucket)

    def receive_rows(self, bucket: Bucket, rows: torch.Tensor) -> None:
        bucket.params[0].grad = rows


def deliver(bucket: Bucket) -> None:
    """Put the result, which has arrived, into ``param.grad``. Has no effect if the bucket did not travel."""
    slot_view = bucket.slot_view
    if slot_view is None:
        return
    copied: list[int] = []
    outputs: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    for position, (param, participates) in enumerate(zip(bucket.params, bucket.participates, strict=True)):
        if not participates:
            continue  # frozen: must not get a gradient
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
    after = bucket.options.after(slot_view.session.size)
    if after != 1.0 and given:
        with torch.no_grad():
            torch._foreach_mul_(given, after)


def release_results(bucket: Bucket) -> None:
    """Copy gradients out of the slot's memory, which the service reuses when the name is declared again."""
    if bucket.slot_view is not None:
        for param, address in zip(bucket.params, bucket.slot_view.result_addresses, strict=True):
            if param.grad is not None and param.grad.data_ptr() == address:
                param.grad = param.grad.detach().clone()


def find_nonfinite(session: Session, buckets: Sequence[Bucket], options: GradientOptions) -> NonFiniteError | None:
    """The error for gradients of ``buckets`` that have arrived; None if they are finite or not checked. Reads gradients
    only if the service has reported some, or if the rank is alone."""
    if not options.nonfinite:
        return None
    alone = options.members(session.size) == 1
    bad = [(bucket, _blame(bucket, session) if alone else bucket.blame) for bucket in buckets]
    bad = [(bucket, blame) for bucket, blame in bad if blame]
    if not bad:
        return None
    blame, step, places = 0, 0, []
    for bucket, its_blame in bad:
        blame |= its_blame
        step = max(step, bucket.round)
        places += list(_places(bucket))
    return nonfinite.explain(blame, session.size, step, places)


def _blame(bucket: Bucket, session: Session) -> int:
    """The blame of a rank that is alone. Its gradients need not travel, so the service may not check them."""
    if bucket.slot_view is not None:
        return bucket.blame
    return blames.of_rank(session.rank, session.size) if any(True for _ in _places(bucket)) else 0


def _places(bucket: Bucket) -> Iterator[str]:
    for position, (name, param) in enumerate(zip(bucket.names, bucket.params, strict=True)):
        if bucket.slot_view is not None:
            found = nonfinite.where(name, bucket.slot_view.results[position], param.dtype)
        elif param.grad is not None and bucket.participates[position]:
            found = nonfinite.where(name, param.grad)
        else:
            found = None
        if found is not None:
            yield found
