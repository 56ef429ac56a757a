"""How members on one machine share a large sum: each adds one share of the tensor, chunk by chunk. Pure; any thread.

Chunk ``c`` of every share is *given* in step ``c`` (each member writes, for each other member, the part which that
member adds), *added* in step ``c + 1``, and all members *take* the sums in step ``c + 2``:

    step     0        1        2        3      …
    give     chunk 0  chunk 1  chunk 2  chunk 3
    add               chunk 0  chunk 1  chunk 2
    take                       chunk 0  chunk 1

The last step publishes nothing. If members need their own shares only, they take nothing. All counts are in elements of
the tensor; positions are those of members in their group.
"""

from __future__ import annotations

_LINE = 64  # bytes: no two members write to one cache line


class Chunks:
    """The chunks of ``count`` elements of ``itemsize`` bytes among ``members``, which use ``slot_bytes`` of their
    slots. ``scatters``: each member needs its own share only, and all shares have the same size if that is possible.
    Otherwise shares begin at a cache line.

    >>> chunks = Chunks(1000, 4, 2, 1024)
    >>> chunks.chunk_elements, chunks.count, chunks.steps
    (128, 4, 5)
    >>> [chunks.of(1, c) for c in range(4)]
    [(512, 128), (640, 128), (768, 128), (896, 104)]
    """

    def __init__(self, count: int, itemsize: int, members: int, slot_bytes: int, scatters: bool = False) -> None:
        line = _LINE // itemsize
        #: Elements of a chunk: a slot holds one chunk for each member.
        self.chunk_elements = slot_bytes // members // _LINE * line
        self._elements = count
        #: Elements that a member adds; the last members may add fewer.
        self.share = count // members if scatters and count % members == 0 else -(-count // members // line) * line
        #: Chunks of each share.
        self.count = -(-self.share // self.chunk_elements)
        #: Steps that a member publishes.
        self.steps = self.count + 1

    def share_of(self, position: int) -> tuple[int, int]:
        """(first element, number of elements) of the share that the member at ``position`` adds."""
        first, end = (min(number * self.share, self._elements) for number in (position, position + 1))
        return first, end - first

    def of(self, position: int, chunk: int) -> tuple[int, int]:
        """(first element, number of elements) of a chunk of the share that the member at ``position`` adds. The last
        shares may be shorter, or empty."""
        first = min(position * self.share + chunk * self.chunk_elements, self._elements)
        end = min((position + 1) * self.share, first + self.chunk_elements, self._elements)
        return first, max(0, end - first)
