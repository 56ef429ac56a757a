"""The header of a data-plane message: what a CS and an SS say to each other. Pure; any thread.

Over TCP a message is [header, payload], sealed (dataplane/seal.py) but for those of the handshake; between two
processes of one machine it is a header whose payload lies in shared memory (``local``). Nothing here allocates by what
a header claims.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from byteps_py.errors import ProtocolError
from byteps_py.tensors import DType, Op

MAGIC = 0x31535042  # "BPS1", little endian
VERSION = 6

# magic, version, kind, dtype, op | epoch, sender, root, machines | key | generation, index | round | offset | length
# | payload segment, payload offset, answer segment, answer offset | flags | blame | waited
_LAYOUT = struct.Struct("<IBBBB IHHH Q II Q Q Q IQIQ B Q I")
HEADER_BYTES = _LAYOUT.size
MAX_WAITED_US = (1 << 32) - 1


class Kind(enum.IntEnum):
    """What a message is for; the values are wire codes and never change."""

    HELLO = 1  # CS → SS or CS, first on a connection: who I am; payload: see dataplane/handshake.py
    PUSH = 2  # CS → SS: my contribution; an answer is expected
    PULL = 3  # CS → SS: I contribute nothing to this broadcast, but want its result
    ANSWER = 4  # SS → CS: the result of a round; CS → CS: the bytes that were fetched
    REFUSED = 5  # to a CS: the message is not accepted; payload: the reason, as text
    SEGMENT = 6  # CS → SS on one machine: a shared-memory segment, its descriptor beside the message
    PROBE = 7  # CS → SS, and back as it came: how fast is the way?
    FETCH = 8  # CS → CS: give me bytes of a rank of yours; payload: a Fetch. The answer is an ANSWER with them
    FETCH_SUM = 9  # CS → CS: give me your machine's sum of a part of a scattered reduction; its offset: which part
    PASS = 10  # CS → SS: my ranks have joined, and I contribute nothing; tell me, without the result, when it is there
    WANT = 11  # SS → CS: another machine lacks the result of this round; if you have it, give me your part once more
    WITHDRAW = 12  # CS → SS: what I gave to this round goes to another server; no answer
    TAKEN = 13  # CS → CS: I have all of what a Fetch names, of its round ``taken``; no answer
    AWAITED = 14  # SS → CS: others have given to these rounds, and wait for you; payload: names of rounds; no answer
    CHALLENGE = 20  # back, at a HELLO: prove that you know the secret, as I do
    PROOF = 21  # CS → SS or CS, at a CHALLENGE
    DAMAGED = 22  # back: message number ``round`` of this connection could not be opened; send it again
    WELCOME = 23  # back, at a PROOF; this and all that follows, each way, is sealed


#: Flags of a contribution. RESENT: its machine lacks the result, though the server may have sent it. SUPPLY: its
#: machine has the result, and wants no answer; it was asked for it (WANT).
RESENT = 1
SUPPLY = 2


@dataclass(slots=True)
class Header:
    """One message's header. ``sender``: machine index of the CS. ``root``: machine index of a broadcast's
    source. ``index``: which partition of the key; ``offset``, ``length``: where it lies in the tensor and how
    long it is, in bytes. The next four fields place payload and answer in shared memory (0 over TCP). ``machines``:
    how many contribute, 0 for all. ``flags``: of RESENT and SUPPLY. ``blame`` (see blame.py): of a PUSH, who is to
    blame if its payload is NaN or infinite, 0 if nobody wants to know; of its ANSWER, who is. ``waited_us``: of an
    ANSWER, for how long the PUSH had waited for others."""

    kind: Kind
    sender: int
    epoch: int = 0
    dtype: DType = DType.UINT8
    op: Op = Op.SUM
    root: int = 0xFFFF
    key: int = 0
    generation: int = 0
    index: int = 0
    round: int = 0
    offset: int = 0
    length: int = 0
    segment: int = 0
    segment_offset: int = 0
    answer_segment: int = 0
    answer_offset: int = 0
    machines: int = 0
    flags: int = 0
    blame: int = 0
    waited_us: int = 0

    @property
    def is_resent(self) -> bool:
        return bool(self.flags & RESENT)

    @property
    def is_supply(self) -> bool:
        return bool(self.flags & SUPPLY)

    @property
    def answer_place(self) -> tuple[int, int]:
        """Where in shared memory the answer is wanted, or lies: segment, offset."""
        return self.answer_segment, self.answer_offset

    def pack(self) -> bytes:
        return _LAYOUT.pack(
            MAGIC,
            VERSION,
            self.kind,
            self.dtype,
            self.op,
            self.epoch,
            self.sender,
            self.root,
            self.machines,
            self.key,
            self.generation,
            self.index,
            self.round,
            self.offset,
            self.length,
            self.segment,
            self.segment_offset,
            self.answer_segment,
            self.answer_offset,
            self.flags,
            self.blame,
            self.waited_us,
        )

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Header:
        """Raises ProtocolError for anything that no correct peer sends."""
        if len(data) != HEADER_BYTES:
            raise ProtocolError(f"a header has {HEADER_BYTES} bytes, got {len(data)}")
        (magic, version, kind, dtype, op, epoch, sender, root, machines, key, generation, index, round_, offset, length,
         segment, segment_offset, answer_segment, answer_offset, flags, blame, waited_us) = _LAYOUT.unpack(
            data
        )  # fmt: skip
        if magic != MAGIC:
            raise ProtocolError(f"not a byteps_py message (magic {magic:#010x})")
        if version != VERSION:
            raise ProtocolError(f"peer speaks version {version} of the data plane, this process {VERSION}")
        try:
            return cls(
                _KINDS[kind], sender, epoch, _DTYPES[dtype], _OPS[op], root, key, generation, index, round_,
                offset, length, segment, segment_offset, answer_segment, answer_offset, machines, flags, blame,
                waited_us,
            )  # fmt: skip
        except KeyError:
            raise ProtocolError(f"unknown code in header: kind {kind}, dtype {dtype}, op {op}") from None


# Plain dictionaries: an enum's call takes ten times as long, and every message pays it.
_KINDS = {int(k): k for k in Kind}
_DTYPES = {int(d): d for d in DType}
_OPS = {int(o): o for o in Op}


#: A round of a partition: key, generation, index, round.
RoundName = tuple[int, int, int, int]

_NAME = struct.Struct("<QIIQ")
MAX_NAMES = 64


def name_of(header: Header) -> RoundName:
    """What a contribution has in common with its answer alone."""
    return header.key, header.generation, header.index, header.round


def pack_names(names: Sequence[RoundName]) -> bytes:
    """The payload of an AWAITED."""
    return b"".join(_NAME.pack(*name) for name in names)


def unpack_names(data: bytes) -> list[RoundName]:
    """Raises ProtocolError."""
    if len(data) % _NAME.size or not 0 < len(data) <= MAX_NAMES * _NAME.size:
        raise ProtocolError(f"{len(data)} bytes are not the names of 1 to {MAX_NAMES} rounds")
    return list(_NAME.iter_unpack(data))


_FETCH = struct.Struct("<IIQBQ")


@dataclass(frozen=True, slots=True)
class Fetch:
    """The payload of a FETCH: of the piece, of ``total`` bytes, that rank ``source`` has for rank ``target``, the
    header's ``length`` bytes at its ``offset`` are wanted. The header's ``index`` numbers the requests, of FETCH_SUM
    as well. ``is_tentative``: if it has another size it stays there, for a later request. ``taken``: a round of which
    all that ``source`` had for ``target`` has come; 0: none. Until then it is kept, as it may be lost on the way."""

    source: int
    target: int
    total: int
    is_tentative: bool = False
    taken: int = 0

    def pack(self) -> bytes:
        return _FETCH.pack(self.source, self.target, self.total, self.is_tentative, self.taken)

    @classmethod
    def unpack(cls, data: bytes) -> Fetch:
        """Raises ProtocolError."""
        if len(data) != _FETCH.size:
            raise ProtocolError(f"a FETCH has a payload of {_FETCH.size} bytes, got {len(data)}")
        source, target, total, is_tentative, taken = _FETCH.unpack(data)
        return cls(source, target, total, bool(is_tentative), taken)
