"""Errors of ranks that all ranks of a pipeline are told. One thread."""

from __future__ import annotations

from typing import NoReturn

import torch.distributed as dist

from byteps_py.errors import PipelineError
from byteps_py.wording import ranks_text


def raise_failures(error: Exception | None, group: dist.ProcessGroup) -> NoReturn:
    """Raise PipelineError with the errors of all ranks of ``group``, which call it together: at least one of them has
    an ``error``."""
    said: list[str | None] = [None] * dist.get_world_size(group)
    mine = None if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(said, mine, group=group)
    by_text: dict[str, list[int]] = {}
    for rank, text in zip(dist.get_process_group_ranks(group), said, strict=True):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    told = (f"{ranks_text(ranks)}: {text}" for text, ranks in by_text.items())
    raise PipelineError("; ".join(told)) from error
