"""The changes of an answer, whose receiver has the code of its own."""

from __future__ import annotations

import pytest

from byteps_py.errors import ProtocolError
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import DType, Op
from byteps_py.wire.data_link import CODED, Header, Kind, changes_nbytes, pack_changes, unpack_changes


def test_changes_as_they_travel() -> None:
    data = pack_changes([2, 0, 1], [b"abcd", b"efgh"])
    assert len(data) == changes_nbytes(3, 8)
    places = unpack_changes(data, own=0, size=4)
    assert [data[at : at + 4] if at >= 0 else None for at in places] == [b"abcd", None, b"efgh"]
    assert unpack_changes(pack_changes([], []), own=0, size=4) == []


@pytest.mark.parametrize(
    "data",
    [b"", b"abc", pack_changes([1, 2], [b"abcd"]), pack_changes([1], [b"abcde"]), b"\xff" * 64],
    ids=["nothing", "too short", "a code is missing", "too long", "too many"],
)
def test_changes_of_another_size_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"changes in \d+ bytes"):
        unpack_changes(data, own=0, size=4)


def test_the_payload_of_a_header() -> None:
    codec = Codec.topk(0.03, bits=2)
    header = Header(Kind.PUSH, 0, dtype=DType.FLOAT32, op=Op.ACCUMULATE, length=4 * 5000, codec=codec.code)
    assert header.payload_nbytes == 20_000
    header.flags = CODED
    assert header.payload_nbytes == 2 * codec.item_bytes
    header.codec = 99
    with pytest.raises(ProtocolError, match=r"unknown codec 0x63 in header"):
        _ = header.payload_nbytes
