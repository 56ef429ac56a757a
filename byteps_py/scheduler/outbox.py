"""What one side has said and the other side may not have got: numbered, kept until then. Pure; one thread at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

M = TypeVar("M")


class Outbox(Generic[M]):
    """Messages are numbered from 1, in order; those up to ``last`` have been put in, the older ones dropped.

    >>> box = Outbox[str]()
    >>> box.put("a"), box.put("b")
    (1, 2)
    >>> box.drop(1)
    >>> list(box), box.last
    ([(2, 'b')], 2)
    """

    def __init__(self) -> None:
        self.last = 0
        self._kept: deque[M] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[tuple[int, M]]:
        return enumerate(self._kept, self.last - len(self._kept) + 1)

    def put(self, message: M) -> int:
        """Keep a message; its number."""
        self._kept.append(message)
        self.last += 1
        return self.last

    def has(self, received: int) -> bool:
        """True if the other side, which has got all up to ``received``, can be told all that comes after it."""
        return self.last - len(self._kept) <= received <= self.last

    def drop(self, received: int) -> None:
        """The other side has got all up to this number."""
        while self._kept and self.last - len(self._kept) < received:
            self._kept.popleft()
