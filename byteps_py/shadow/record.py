"""What a rank attaches to a step's record: the user's object, pickled, and the model's buffers. Pure; any thread.

A program that writes checkpoints has to read the buffers, and must not unpickle the user's object, whose classes it may
not have. So what it reads consists of plain types, and nothing else is accepted.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from byteps_py.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class StoredBuffer:
    """A buffer of the model. ``dtype``: as torch prints it. ``data``: its elements in order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Attachment:
    """``extra``: the user's object, pickled; empty for None. ``buffers``: by their names in the model's state_dict.

    >>> attached = Attachment(b"", {"mean": StoredBuffer("torch.float32", (1,), bytes(4))})
    >>> Attachment.unpack(attached.pack()) == attached
    True
    """

    extra: bytes
    buffers: Mapping[str, StoredBuffer]

    def pack(self) -> bytes:
        """For a ShadowRecord; empty if there is nothing."""
        if not self.extra and not self.buffers:
            return b""
        buffers = {name: (each.dtype, each.shape, each.data) for name, each in self.buffers.items()}
        return pickle.dumps((self.extra, buffers))

    @classmethod
    def unpack(cls, packed: bytes) -> Attachment:
        """Raises ProtocolError for what ``pack`` does not make."""
        if not packed:
            return cls(b"", {})
        try:
            extra, buffers = _PlainUnpickler(io.BytesIO(packed)).load()
            found = {
                str(name): StoredBuffer(dtype, tuple(shape), data) for name, (dtype, shape, data) in buffers.items()
            }
        except (pickle.UnpicklingError, ValueError, TypeError, AttributeError, EOFError, IndexError, KeyError) as error:
            raise ProtocolError(f"what a rank has attached to its record is damaged: {error}") from error
        return cls(extra, found)


class _PlainUnpickler(pickle.Unpickler):
    """Numbers, texts, bytes and containers of them."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it has a {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to other objects")
