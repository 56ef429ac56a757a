"""Explains combined gradients that are NaN or infinite: which ranks caused them, and which parameters have them.

Reads gradients only if the service has reported some, or if the rank is alone. The thread that waits for the gradients
calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from byteps_py import blame as blames
from byteps_py.errors import NonFiniteError
from byteps_py.session import Session
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.gradients.bucket import Bucket, GradientOptions


def find_error(session: Session, buckets: Sequence[Bucket], options: GradientOptions) -> NonFiniteError | None:
    """The error for gradients of ``buckets`` that have arrived; None if they are finite or not checked."""
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
