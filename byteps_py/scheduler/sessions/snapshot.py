"""A scheduler's whole state as bytes, so that the journal of a long job does not grow for ever. Pure.

The parts of the state are pickled as they are: when they change, nothing has to change here. A snapshot is read only
from the scheduler's own file, by the same version of the package, and only into classes of the scheduler and of the
modules in ``_PACKAGES``.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from google.protobuf.message import Message

from byteps_py import __version__
from byteps_py.errors import JournalError
from byteps_py.proto import control_pb2 as pb

_PACKAGES = ("byteps_py.scheduler.", "byteps_py.failure_detector", "byteps_py.tensors", "byteps_py.placement.")
_PLAIN = {("builtins", "set"), ("builtins", "frozenset"), ("builtins", "range"), ("collections", "deque")}


def freeze(state: dict[str, Any]) -> bytes:
    """The bytes from which ``thaw`` makes an equal state. References to one object stay references to one object."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump({**state, "version": __version__})
    return file.getvalue()


def thaw(data: bytes) -> dict[str, Any]:
    """The state of these bytes. Raises JournalError if another version wrote them, or if they are not a snapshot."""
    try:
        state = _Unpickler(io.BytesIO(data)).load()
        version = state.pop("version")
    except JournalError:
        raise
    except Exception as error:
        raise JournalError(f"the snapshot in the scheduler's journal can't be read: {error!r}") from error
    if version != __version__:
        raise JournalError(f"byteps_py {version} wrote the scheduler's journal, and this is {__version__}")
    return state  # type: ignore[no-any-return]


def message(name: str, data: bytes) -> Message:
    """A message of the control plane."""
    found: Message = getattr(pb, name).FromString(data)
    return found


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Message):
            return message, (type(obj).DESCRIPTOR.name, obj.SerializeToString())
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module.startswith(_PACKAGES):
            found = super().find_class(module, name)
            # Only classes that the module defines: its namespace also holds what it imports.
            if found is message or (isinstance(found, type) and found.__module__ == module):
                return found
        raise JournalError(
            f"the snapshot in the scheduler's journal names {module}.{name}, which is not allowed in a snapshot"
        )
