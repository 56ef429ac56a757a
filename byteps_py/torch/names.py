"""Names for tensors that the user gave none. Pure; any thread."""

from __future__ import annotations

import threading

#: Below this many bytes, so many names are used in turn; above, the last: memory stays bounded.
_ROTATION = ((64 << 10, 32), (4 << 20, 8))
_NAMES_OF_LARGE = 2


class NameSource:
    """Numbers unnamed operations by signature (operation, dtype, shape).

    So the nth unnamed operation of a signature has the same name on every rank, whatever else ran between.
    """

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._lock = threading.Lock()

    def next(self, kind: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> str:
        """
        >>> source = NameSource()
        >>> source.next("sum", "float32", (2, 3), 24), source.next("sum", "float32", (2, 3), 24)
        ('sum.noname.float32.2x3.0', 'sum.noname.float32.2x3.1')
        """
        signature = f"{kind}.noname.{dtype}.{'x'.join(map(str, shape))}"
        names = next((names for limit, names in _ROTATION if nbytes < limit), _NAMES_OF_LARGE)
        with self._lock:
            count = self._counters.get(signature, 0)
            self._counters[signature] = count + 1
        return f"{signature}.{count % names}"
