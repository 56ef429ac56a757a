"""The contents of a step's record. Pure; any thread.

``common`` is JSON of the data that is the same on all ranks of an optimizer, and is in the record of the first of them.
Where ranks have parts of one model, each part has an optimizer of its own, and all of them step together:

    parts     [tensor of gradients, its elements, its latest step]
    params    by name, [tensor, first element in it, shape, dtype]; in the order of the elements
    steps     by tensor, the steps that each of its parameters has made, or one number for all
    kinds     by tensor, the names of its states
    groups    the param_groups, without their parameters
    members   of each param_group, the places of its parameters among params
    calls     of step() so far, which may have made fewer steps
    names     by name, the names in the model, where they differ
    ranks     that share the optimizer; none for all

An Attachment is the data that each rank attaches: the user's object, pickled, and the model's buffers.

A program that writes checkpoints has to read the buffers, and must not unpickle the user's object, whose classes it may
not have. So a record consists of plain types, and nothing else is accepted.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from byteps_py.errors import ProtocolError


def read_common(data: bytes) -> dict[str, Any]:
    """The contents of ``common``, with a parameter's steps as the last entry of its list in ``params``. Raises
    ValueError, TypeError or LookupError for anything else."""
    common: dict[str, Any] = json.loads(data)
    steps, place = common.pop("steps"), dict.fromkeys(common["kinds"], 0)
    for entry in common["params"].values():
        made = steps[entry[0]]
        entry.append(made if isinstance(made, int) else made[place[entry[0]]])
        place[entry[0]] += 1
    return common


@dataclass(frozen=True, slots=True)
class StoredBuffer:
    """A buffer of the model. ``dtype``: as torch prints it. ``data``: its elements in order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Attachment:
    """``extra``: the user's object, pickled; empty for None. ``buffers``: by their names in the model's state_dict.
    ``constants``: of large buffers that have not changed since the model was made, their digests alone.

    >>> attached = Attachment(b"", {"mean": StoredBuffer("torch.float32", (1,), bytes(4))})
    >>> Attachment.unpack(attached.pack()) == attached
    True
    """

    extra: bytes
    buffers: Mapping[str, StoredBuffer]
    constants: Mapping[str, str] = field(default_factory=dict)

    def pack(self) -> bytes:
        """The bytes that travel beside a ShadowRecord; empty if there are none."""
        if not self.extra and not self.buffers and not self.constants:
            return b""
        buffers = {name: (each.dtype, each.shape, each.data) for name, each in self.buffers.items()}
        return pickle.dumps((self.extra, buffers, dict(self.constants)))

    @classmethod
    def unpack(cls, packed: bytes | bytearray) -> Attachment:
        """Raises ProtocolError for bytes that ``pack`` does not make."""
        if not packed:
            return cls(b"", {})
        try:
            extra, buffers, constants = _PlainUnpickler(io.BytesIO(packed)).load()
            found = {
                str(name): StoredBuffer(dtype, tuple(shape), data) for name, (dtype, shape, data) in buffers.items()
            }
            constants = dict(constants)
        except (pickle.UnpicklingError, ValueError, TypeError, AttributeError, EOFError, IndexError, KeyError) as error:
            raise ProtocolError(f"what a rank has attached to its record is damaged: {error}") from error
        return cls(extra, found, {str(name): str(digest) for name, digest in constants.items()})


class _PlainUnpickler(pickle.Unpickler):
    """Numbers, texts, bytes and containers of them."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it has a {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to other objects")
