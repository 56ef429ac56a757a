"""The ranks that save or load together: all go on, or all raise the same error. One thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from byteps_py.errors import BytePSError, CheckpointError
from byteps_py.torch.horovod import api
from byteps_py.torch.operations.broadcasts import allgather_object

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """``names``: the ranks' numbers in the job, for errors. ``rank``: this one's place among them. Without
    torch.distributed, the ranks are those of ``byteps.init()``, or this process alone."""

    rank: int
    names: Sequence[int]
    group: dist.ProcessGroup | None = None
    is_torchs: bool = False

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """The ranks of a process group; None: all ranks."""
        if dist.is_initialized():
            return cls(dist.get_rank(group), dist.get_process_group_ranks(group or dist.group.WORLD), group, True)
        if api.is_initialized():
            return cls(api.rank(), range(api.size()))
        return cls(0, range(1))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.names)

    def gathered(self, own: _T) -> list[_T]:
        """Each rank's object, on all ranks."""
        if self.size == 1:
            return [own]
        if not self.is_torchs:
            return allgather_object(own)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self.group)
        return found

    def gathered_on_first(self, own: _T) -> list[_T] | None:
        """Each rank's object, on the first rank; None on the others."""
        if self.size == 1 or not self.is_torchs:
            return self.gathered(own)
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(own, found, dst=self.names[0], group=self.group)
        return found

    def scattered(self, of_ranks: Sequence[_T] | None) -> _T:
        """This rank's object of those that the first rank has."""
        if self.size == 1 or not self.is_torchs:
            found = self.gathered(of_ranks)[0]
            if found is None:
                raise CheckpointError("the first rank has scattered nothing")
            return found[self.rank]
        own: list[Any] = [None]
        dist.scatter_object_list(
            own, list(of_ranks) if self.rank == 0 and of_ranks else None, self.names[0], self.group
        )
        result: _T = own[0]
        return result

    def from_first(self, own: _T) -> _T:
        """The first rank's object."""
        if self.size == 1 or not self.is_torchs:
            return self.gathered(own)[0]
        shared: list[Any] = [own]
        dist.broadcast_object_list(shared, self.names[0], group=self.group)
        result: _T = shared[0]
        return result

    def together(self, work: Callable[[], _T]) -> _T:
        """Call ``work`` and return its result. If it raises on some ranks, all raise the error of the first of
        these."""
        own: Exception | None = None
        try:
            result = work()
        except Exception as error:  # the other ranks must hear of any
            own = error
        self.agree(own)
        return result

    def agree(self, own: Exception | None) -> None:
        """Raise the error of the first rank that has one, on all ranks."""
        told = None if own is None else (type(own) if isinstance(own, BytePSError) else None, _text(own))
        for place, found in enumerate(self.gathered(told)):
            if found is None:
                continue
            kind, text = found
            if place == self.rank and own is not None:
                raise own
            raise (kind or CheckpointError)(
                text if place == self.rank else f"rank {self.names[place]}: {text}"
            ) from own


def _text(error: Exception) -> str:
    text = str(error)
    return text if isinstance(error, BytePSError) else f"{type(error).__name__}: {text}"
