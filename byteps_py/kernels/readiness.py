"""Which kernels are ready: the others are compiled, or loaded, on an engine's thread while everything else goes on.

Owned by the loop's thread, and only it calls these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from byteps_py.kernels.engine import Done, Engine, Work
from byteps_py.loop import EventLoop
from byteps_py.tensors import Checks, DType, Op

Pair = tuple[Op, DType] | tuple[Op, DType, Checks]


class Readiness:
    """``prepare``: kernels.prepare. ``failed(error)``: a kernel can't be compiled; what waited for it has failed with
    the same error."""

    def __init__(
        self, prepare: Callable[..., None], engine: Engine, loop: EventLoop, failed: Callable[[BaseException], None]
    ) -> None:
        self._prepare = prepare
        self._engine = engine
        self._loop = loop
        self._failed = failed
        self._ready: set[Pair] = set()
        self._when_done: list[Callable[[], None]] = []
        # By pair that is being prepared: what is to run when it is.
        self._waiting: dict[Pair, list[tuple[int, Work, Done]]] = {}

    def __contains__(self, pair: Pair) -> bool:
        """A call of its kernel takes no longer than memory does."""
        return pair in self._ready or pair[0] is Op.BROADCAST  # that is a copy, which nobody checks

    def expect(self, pairs: Iterable[Pair]) -> None:
        """These will be needed."""
        for pair in pairs:
            if pair not in self and pair not in self._waiting:
                self._waiting[pair] = []
                self._engine.submit(0, lambda pair=pair: self._make_ready(pair), self._reporter(pair))  # type: ignore[misc]

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, when nothing is being prepared: at once, or later."""
        if self._waiting:
            self._when_done.append(callback)
        else:
            callback()

    def submit(self, pair: Pair, priority: int, work: Work, done: Done) -> None:
        """``Engine.submit`` when the kernel is ready: work that needs a compiler keeps no thread waiting for it.

        ``done`` is called by any thread.
        """
        if pair in self:
            self._engine.submit(priority, work, done)
        else:
            self.expect([pair])
            self._waiting[pair].append((priority, work, done))

    def _make_ready(self, pair: Pair) -> None:
        """Any thread."""
        op, dtype, *checks = pair
        self._prepare([(op, dtype)], *checks)

    def _reporter(self, pair: Pair) -> Done:
        return lambda error: self._loop.post(lambda: self._prepared(pair, error))

    def _prepared(self, pair: Pair, error: BaseException | None) -> None:
        waiting = self._waiting.pop(pair)
        if error is None:
            self._ready.add(pair)
            for priority, work, done in waiting:
                self._engine.submit(priority, work, done)
        else:
            for _, _, done in waiting:
                done(error)
            self._failed(error)
        if not self._waiting:
            callbacks, self._when_done = self._when_done, []
            for callback in callbacks:
                callback()
