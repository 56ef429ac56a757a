"""Packs frozen dataclasses into bytes and back: the messages of a link. Pure; any thread.

Each field's annotation says how it is packed. The numbers of a record come first, then its texts, bytes and tuples,
each of which has its size among the numbers::

    link = MessageCodec("local message")

    @link.message(7)
    @dataclass(frozen=True, slots=True)
    class Note:
        urgency: U8
        text: Text

A decoded record has the types that its class names. Its reader checks whether the values make sense.
"""

from __future__ import annotations

import dataclasses
import struct
import typing
from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any, Protocol, TypeVar

from byteps_py.errors import ProtocolError, UsageError


@dataclasses.dataclass(frozen=True, slots=True)
class NumberFormat:
    """A number: a letter of the struct module."""

    letter: str


class FieldCodec(Protocol):
    """Packs a field whose size varies."""

    def pack(self, value: Any) -> bytes:
        """The field's bytes. Raises struct.error."""

    def unpack(self, data: bytes) -> Any:
        """The value. Raises struct.error or ValueError."""


class TextCodec:
    """A str, as UTF-8. Text that can't be encoded, such as the name of a file in an error, is escaped."""

    def pack(self, value: str) -> bytes:
        return value.encode(errors="backslashreplace")

    def unpack(self, data: bytes) -> str:
        return data.decode()


class BytesCodec:
    """Bytes as they are."""

    def pack(self, value: bytes) -> bytes:
        return value

    def unpack(self, data: bytes) -> bytes:
        return data


class NumbersCodec:
    """A tuple of numbers of the same format."""

    def __init__(self, letter: str) -> None:
        self._letter = letter
        self._itemsize = struct.calcsize(f"<{letter}")

    def pack(self, value: tuple[Any, ...]) -> bytes:
        return struct.pack(f"<{len(value)}{self._letter}", *value)

    def unpack(self, data: bytes) -> tuple[Any, ...]:
        return struct.unpack(f"<{len(data) // self._itemsize}{self._letter}", data)


class TextsCodec:
    """A tuple of texts, none of them empty."""

    def pack(self, value: tuple[str, ...]) -> bytes:
        return "\0".join(value).encode()

    def unpack(self, data: bytes) -> tuple[str, ...]:
        return tuple(data.decode().split("\0")) if data else ()


class RowsCodec:
    """A tuple of tuples of numbers; ``letters``: the format of each."""

    def __init__(self, letters: str) -> None:
        self._row = struct.Struct(f"<{letters}")

    def pack(self, value: tuple[tuple[Any, ...], ...]) -> bytes:
        if len(value) == 1:
            return self._row.pack(*value[0])
        pack = self._row.pack
        return b"".join([pack(*row) for row in value])

    def unpack(self, data: bytes) -> tuple[tuple[Any, ...], ...]:
        return tuple(self._row.iter_unpack(data))


U8 = Annotated[int, NumberFormat("B")]
U32 = Annotated[int, NumberFormat("I")]
U64 = Annotated[int, NumberFormat("Q")]
I32 = Annotated[int, NumberFormat("i")]
F64 = Annotated[float, NumberFormat("d")]
Flag = Annotated[bool, NumberFormat("?")]
Text = Annotated[str, TextCodec()]
Texts = Annotated[tuple[str, ...], TextsCodec()]
Data = Annotated[bytes, BytesCodec()]
U32s = Annotated[tuple[int, ...], NumbersCodec("I")]
U64s = Annotated[tuple[int, ...], NumbersCodec("Q")]
F64s = Annotated[tuple[float, ...], NumbersCodec("d")]
Pairs = Annotated[tuple[tuple[int, int], ...], RowsCodec("QQ")]


class RecordCodec:
    """Packs the records of one dataclass, and as a FieldCodec tuples of them. Its numbers must be its first fields."""

    def __init__(self, record: type) -> None:
        hints = typing.get_type_hints(record, include_extras=True)
        kinds = [(field.name, _kind_of(hints[field.name])) for field in dataclasses.fields(record)]
        numbers = [(name, kind) for name, kind in kinds if isinstance(kind, NumberFormat)]
        if kinds[: len(numbers)] != numbers:
            raise TypeError(f"{record.__name__}: numbers come before texts, bytes and tuples")
        self.record = record
        self.names = [name for name, _ in numbers]
        self.others: list[tuple[Callable[[Any], Any], FieldCodec]] = [
            (attrgetter(name), kind) for name, kind in kinds[len(numbers) :] if not isinstance(kind, NumberFormat)
        ]
        # attrgetter returns no tuple of one value
        self._numbers = attrgetter(*self.names) if len(numbers) > 1 else self._few_numbers
        letters = "".join(kind.letter for _, kind in numbers)
        self._header = struct.Struct(f"<{letters}{'I' * len(self.others)}")

    def _few_numbers(self, record: Any) -> tuple[Any, ...]:
        return tuple([getattr(record, name) for name in self.names])

    def pack_one(self, record: Any) -> bytes:
        """The record's bytes. Raises struct.error."""
        if not self.others:
            return self._header.pack(*self._numbers(record))
        others = [codec.pack(value_of(record)) for value_of, codec in self.others]
        return self._header.pack(*self._numbers(record), *map(len, others)) + b"".join(others)

    def unpack_one(self, data: bytes, at: int = 0) -> tuple[Any, int]:
        """The record at a place, and where it ends. Raises struct.error or ValueError."""
        if at + self._header.size > len(data):
            raise ValueError(f"it has at least {at + self._header.size} bytes, got {len(data)}")
        values = self._header.unpack_from(data, at)
        at += self._header.size
        if not self.others:
            return self.record(*values), at
        sizes = iter(values[len(self.names) :])
        arguments = list(values[: len(self.names)])
        for _, codec in self.others:
            end = at + next(sizes)
            if end > len(data):
                raise ValueError(f"a field ends at {end} of {len(data)} bytes")
            arguments.append(codec.unpack(data[at:end]))
            at = end
        return self.record(*arguments), at

    def unpack_whole(self, data: bytes, at: int = 0) -> Any:
        """The record that ``data`` has from ``at`` to its end. Raises struct.error or ValueError."""
        record, end = self.unpack_one(data, at)
        if end != len(data):
            raise ValueError(f"{end} of {len(data)} bytes")
        return record

    @property
    def header_bytes(self) -> int:
        """The size of a record's numbers, with the sizes of its other fields."""
        return self._header.size

    def pack(self, value: tuple[Any, ...]) -> bytes:
        return b"".join(map(self.pack_one, value))

    def unpack(self, data: bytes) -> tuple[Any, ...]:
        found, at = [], 0
        while at < len(data):
            record, at = self.unpack_one(data, at)
            found.append(record)
        return tuple(found)


class OneRecordCodec:
    """A record inside of another one."""

    def __init__(self, record: type) -> None:
        self._codec = RecordCodec(record)

    def pack(self, value: Any) -> bytes:
        return self._codec.pack_one(value)

    def unpack(self, data: bytes) -> Any:
        return self._codec.unpack_whole(data)


def _kind_of(hint: Any) -> NumberFormat | FieldCodec:
    """The packing of a field with this annotation."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return OneRecordCodec(hint)
    if typing.get_origin(hint) is tuple:  # of records
        return RecordCodec(typing.get_args(hint)[0])
    kind: NumberFormat | FieldCodec = hint.__metadata__[0]
    return kind


M = TypeVar("M")


class MessageCodec:
    """The messages of a link, each of which is a dataclass with a code. ``noun``: the name of a message in errors."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._unpack: dict[int, tuple[str, Callable[[bytes], Any]]] = {}
        self._pack: dict[type, Callable[[Any], bytes]] = {}

    def message(self, code: int) -> Callable[[type[M]], type[M]]:
        """Decorates a dataclass, whose messages begin with the byte ``code``."""

        def add(record: type[M]) -> type[M]:
            if code in self._unpack:
                raise TypeError(f"two messages have the code {code}")
            pack, unpack = _message_functions(RecordCodec(record), bytes((code,)))
            self._pack[record], self._unpack[code] = pack, (record.__name__, unpack)
            return record

        return add

    def encode(self, message: object) -> bytes:
        """The message's bytes. Raises UsageError if a value is out of its field's range."""
        try:
            return self._pack[type(message)](message)
        except struct.error as error:
            raise UsageError(f"{message!r:.200} can't be sent: {error}") from None

    def decode(self, data: bytes) -> Any:
        """The message in ``data``. Raises ProtocolError."""
        try:
            name, unpack = self._unpack[data[0]]
        except (LookupError, IndexError):
            raise ProtocolError(f"unknown kind of {self._noun}: {data[:1]!r}") from None
        try:
            return unpack(data)
        except (struct.error, ValueError) as error:
            raise ProtocolError(f"malformed {self._noun} {name}: {error}") from None


def _message_functions(codec: RecordCodec, code: bytes) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """Pack and unpack a message. A field that is alone has no size: the most frequent messages have one such field."""
    if not codec.names and len(codec.others) == 1:
        ((value_of, field),) = codec.others
        pack_field, unpack_field, record = field.pack, field.unpack, codec.record
        return lambda message: code + pack_field(value_of(message)), lambda data: record(unpack_field(data[1:]))

    return lambda message: code + codec.pack_one(message), lambda data: codec.unpack_whole(data, 1)
