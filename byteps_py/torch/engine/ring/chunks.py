"""How members on one machine share a large sum: each adds a share of the tensor, chunk by chunk. Pure.

Chunk ``c`` of everybody's share is *given* in step ``c`` (each member lays, for each other, what that one is to add),
*added* in step ``c + 1``, whose sums everybody *takes* in step ``c + 2``:

    step     0        1        2        3      …
    give     chunk 0  chunk 1  chunk 2  chunk 3
    add               chunk 0  chunk 1  chunk 2
    take                       chunk 0  chunk 1

The last step lays nothing. Where members are to have their own shares only, nobody takes. All in elements of the
tensor; positions are those of members in their group.
"""

from __future__ import annotations

_LINE = 64  # bytes: no two members write to one line of a cache


class Chunks:
    """Of ``count`` elements of ``itemsize`` bytes among ``members``, who use ``slot_bytes`` of their slots.
    ``scatters``: each is to have its own share only, and all have as many elements; else shares begin at a line of a
    cache.

    >>> chunks = Chunks(1000, 4, 2, 1024)
    >>> chunks.room, chunks.count, chunks.steps
    (128, 4, 5)
    >>> [chunks.of(1, c) for c in range(4)]
    [(512, 128), (640, 128), (768, 128), (896, 104)]
    """

    def __init__(self, count: int, itemsize: int, members: int, slot_bytes: int, scatters: bool = False) -> None:
        line = _LINE // itemsize
        #: Elements that a slot has for each member.
        self.room = slot_bytes // members // _LINE * line
        self._elements = count
        #: Elements that a member adds; the last ones may have fewer.
        self.share = count // members if scatters else -(-count // members // line) * line
        #: Chunks of each share.
        self.count = -(-self.share // self.room)
        #: That a member lays.
        self.steps = self.count + 1

    def of(self, position: int, chunk: int) -> tuple[int, int]:
        """(first element, how many) of a chunk of the share that the member at ``position`` adds; the last shares may
        be shorter, or nothing."""
        first = min(position * self.share + chunk * self.room, self._elements)
        end = min((position + 1) * self.share, first + self.room, self._elements)
        return first, max(0, end - first)
