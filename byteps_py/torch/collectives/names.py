"""Names for tensors that the user has not named. Pure; any thread.

Unnamed operations are matched in the order of their calls: the nth of one rank with the nth of the others.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

from byteps_py.tensors import UNNAMED

#: (bytes, names): tensors below this size use this many names in turn, so that memory stays bounded.
_ROTATION = ((64 << 10, 32), (4 << 20, 8))
_NAMES_OF_LARGE = 2  # larger tensors
#: For operations whose sizes may differ from call to call.
_NAMES_OF_VARYING = 8


class NameSource:
    """Numbers the unnamed operations of each kind in the order of their calls.

    A name keeps its shape, because ranks would have to agree on another one: an operation like an earlier one gets the
    earlier one's names again. The first operations of a kind get new names, by which ranks whose calls differ detect
    that. After such a disagreement all ranks ``restart``, since their counts differ.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._given: dict[str, int] = {}  # number of names by kind
        self._of: dict[tuple[str, Hashable], tuple[list[str], int]] = {}  # (names, uses) by kind and signature
        self._lock = threading.Lock()

    def next(self, kind: str, signature: Hashable, nbytes: int) -> str:
        """The name of the next operation. ``signature``: the facts on which ranks must agree (dtype, shape …).

        >>> source = NameSource()
        >>> source.next("sum", "float32[2]", 8), source.next("sum", "float32[3]", 12)
        ('sum.noname.0', 'sum.noname.1')
        """
        limit = next((names for limit, names in _ROTATION if nbytes < limit), _NAMES_OF_LARGE)
        with self._lock:
            names, uses = self._of.get((kind, signature), ([], 0))
            if len(names) < limit:
                names.append(self._new(kind))
            self._of[kind, signature] = names, uses + 1
            return names[uses % limit]

    def in_turn(self, kind: str) -> str:
        """The name of the next operation of a kind that needs no agreement in advance: a few names, strictly in turn.

        >>> source = NameSource()
        >>> [source.in_turn("gather") for _ in range(9)][-2:]
        ['gather.noname.7', 'gather.noname.0']
        """
        with self._lock:
            names, uses = self._of.get((kind, None), ([], 0))
            if len(names) < _NAMES_OF_VARYING:
                names.append(self._new(kind))
            self._of[kind, None] = names, uses + 1
            return names[uses % _NAMES_OF_VARYING]

    def restart(self, epoch: int) -> None:
        """Count from 0 again, with other names than in ``epoch``; does nothing if that epoch is over already."""
        with self._lock:
            if epoch == self.epoch:
                self.epoch += 1
                self._given.clear()
                self._of.clear()

    def _new(self, kind: str) -> str:
        number = self._given.get(kind, 0)
        self._given[kind] = number + 1
        return f"{kind}{UNNAMED}{self.epoch}.{number}" if self.epoch else f"{kind}{UNNAMED}{number}"
