"""What one operation is to get of a stream. Pure; the threads of one operation take turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from byteps_py.errors import CommunicationError, JoinedError
from byteps_py.session.peers.message_matcher import Stream
from byteps_py.session.peers.waiting import Wait

#: (address, bytes): a piece of memory of this process.
Span = tuple[int, int]


@dataclass(slots=True, eq=False)
class StreamReceipt:
    """What one operation is to get of a stream: (source, number, where to, bytes, bytes sent there
    in turn or -1), the last one first. ``error``: what has come is not what was expected. ``is_mutual``: all others
    expect the same of all, and nobody begins without one that has joined."""

    stream: Stream
    left: list[tuple[int, int, Sequence[Span], int, int]] = field(default_factory=list)
    wait: Wait | None = None
    error: CommunicationError | None = None
    is_mutual: bool = False

    def expect(self, source: int, spans: Sequence[Span], nbytes: int, sent: int = -1) -> None:
        """The stream's next parcel from ``source``, of ``nbytes`` in all, is for ``spans``. ``sent``: bytes that it has
        been sent in turn, and should expect."""
        self.left.append((source, self.stream.expect(source), spans, nbytes, sent))

    @property
    def is_there(self) -> bool:
        """All of it has come."""
        flows = self.stream.flows
        parcels = (flows[source].parcels.get(number) for source, number, _, _, _ in self.left)
        return all(parcel is not None and parcel.ready == parcel.total for parcel in parcels)

    def missing(self) -> list[int]:
        flows = self.stream.flows
        return [source for source, number, _, _, _ in self.left if number not in flows[source].parcels]


def joined(name: str, rank: int) -> JoinedError:
    """Something that this rank can't be without has not come from ``rank``, and never will."""
    return JoinedError(f"tensor {name!r}: what needs all of its ranks is not supported while rank {rank} has joined")
