"""NaN and infinity in tensors: detection, places, messages. Any thread.

The service reports which ranks contributed them (rank_bits.py). The places are searched in the result, which is the
same on all ranks, so that all ranks raise the same message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from byteps_py import rank_bits
from byteps_py.errors import NonFiniteError
from byteps_py.session import Session
from byteps_py.system.log import logger
from byteps_py.tensors import NonFinite
from byteps_py.torch.collectives.context import Context

_MAX_NAMES = 3


def mode_of(context: Context) -> NonFinite:
    """The value of BYTEPS_NONFINITE."""
    return NonFinite[context.settings.nonfinite.upper()]


def explain(nonfinite_ranks: int, size: int, step: int, places: Sequence[str]) -> NonFiniteError:
    """The error about a non-finite result. ``nonfinite_ranks``: as in Slot. ``step``: 0: unknown. ``places``:
    descriptions, see ``where``."""
    when = f", step {step}" if step else ""
    return NonFiniteError(
        f"NaN or infinity from {rank_bits.text(nonfinite_ranks, size)}{when}: in the gradients of "
        f"{listed(places)}; look at the batch and the loss there. BYTEPS_NONFINITE=skip leaves "
        "such steps out, allow lets the values pass, which a GradScaler needs"
    )


def listed(places: Sequence[str]) -> str:
    """The first of ``places`` (see ``where``), and how many more there are."""
    more = f" and {len(places) - _MAX_NAMES} more" if len(places) > _MAX_NAMES else ""
    return ", ".join(places[:_MAX_NAMES]) + more


def is_finite(tensor: torch.Tensor) -> bool:
    """True if no value of ``tensor``, of any layout, is NaN or infinite. Usually one fast pass over its memory."""
    values, _ = _stored(tensor)
    # A sum is far faster than testing each value, and it is finite only if all values are.
    total = values.sum(dtype=torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(values).all())


def where(name: str, tensor: torch.Tensor, full: torch.dtype | None = None) -> str | None:
    """The number of NaN and infinite values in the gradient ``tensor`` of ``name``, and the first index; None if all
    are finite. ``full``: the gradient's dtype, if ``tensor`` is compressed."""
    values, indices = _stored(tensor)
    bad = ~torch.isfinite(values)
    count = int(bad.sum())
    if not count:
        return None
    first = [int(i) for i in bad.nonzero()[0]]
    if indices is not None:
        first = indices[:, first[0]].tolist() + first[1:]
    narrow = f" as {str(tensor.dtype).removeprefix('torch.')}" if full not in (None, tensor.dtype) else ""
    return f"{name!r} ({count} of {bad.numel()} values{narrow}, the first at {first})"


def _stored(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(values that ``tensor`` stores, their indices; None: all elements in order)."""
    values = tensor.detach()
    if values.layout is torch.strided:
        return values, None
    rows = (values if values.layout is torch.sparse_coo else values.to_sparse()).coalesce()
    return rows.values(), rows.indices()


def report(poison: NonFiniteError, session: Session) -> None:
    """Log, once for each machine, that all ranks skip a step."""
    if session.local_rank == 0:
        logger.warning("a step is left out on every rank. %s", poison)
