"""Objects as bytes, for broadcast_object and allgather_object. Any thread.

With cloudpickle, if it is installed, as in Horovod (lambdas and classes of the main program), else with pickle. Read
only what comes from ranks of the job: they are authenticated, and run the same program anyway.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
from collections.abc import Sequence
from typing import Any

from byteps_py.errors import ProtocolError

_OBJECT, _FAILURE = b"o", b"f"


class NotPickledError(Exception):
    """A rank could not pickle its object; the message says why."""


def packed(obj: Any) -> tuple[bytes, Exception | None]:
    """``obj`` as bytes; or the reason why that is not possible as bytes, for the others, and the error itself."""
    try:
        return _OBJECT + _pickler().dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), None
    except Exception as error:
        return _FAILURE + f"{type(error).__name__}: {error}".encode(), error


def check_lengths(lengths: Sequence[int], count: int, total: int) -> None:
    """Raises ProtocolError unless ``count`` ranks say how long their objects are, in ``total`` bytes."""
    if len(lengths) != count or min(lengths, default=0) < 0 or sum(lengths) != total:
        raise ProtocolError(f"{count} ranks gave objects of {list(lengths[:8])} bytes, {total} bytes in all")


def unpacked(data: bytes) -> Any:
    """The object. Raises NotPickledError if its rank could not pack it, ProtocolError if it is nothing of that kind."""
    if data[:1] == _FAILURE:
        raise NotPickledError(data[1:].decode(errors="replace"))
    if data[:1] != _OBJECT:
        raise ProtocolError(f"{len(data)} bytes came where a rank's object was due")
    return pickle.loads(memoryview(data)[1:])


def _pickler() -> Any:
    return importlib.import_module("cloudpickle") if importlib.util.find_spec("cloudpickle") else pickle
