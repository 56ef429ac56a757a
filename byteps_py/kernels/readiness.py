"""Which kernels are ready. The others are compiled or loaded on a pool thread while the service goes on.

Only the event loop's thread calls these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from byteps_py.kernels.thread_pool import Done, ThreadPool, Work
from byteps_py.system.loop import EventLoop
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import Checks, DType, Op

#: Of a sum that is coded, with its codec.
Pair = tuple[Op, DType] | tuple[Op, DType, Checks | Codec]


class Readiness:
    """Kernels that are ready, and work that waits for the others.

    Args:
        prepare: ``kernels.prepare``.
        pool: runs ``prepare``, and the work.
        loop: the event loop of the thread that owns this object.
        failed: called with the error if a kernel can't be compiled; all work that waited for it got the same error.
        prepare_codec: ``codecs.prepare``.
    """

    def __init__(
        self,
        prepare: Callable[..., None],
        pool: ThreadPool,
        loop: EventLoop,
        failed: Callable[[BaseException], None],
        prepare_codec: Callable[[Codec, DType], None] | None = None,
    ) -> None:
        self._prepare = prepare
        self._prepare_codec = prepare_codec
        self._pool = pool
        self._loop = loop
        self._failed = failed
        self._ready: set[Pair] = set()
        self._when_done: list[Callable[[], None]] = []
        # By pair that is being prepared: the work to submit when it is ready.
        self._waiting: dict[Pair, list[tuple[int, Work, Done]]] = {}

    def __contains__(self, pair: Pair) -> bool:
        """True if a call of the pair's kernel would not wait for a compiler."""
        return pair in self._ready or pair[0] is Op.BROADCAST  # an unchecked copy, which has no kernel

    def expect(self, pairs: Iterable[Pair]) -> None:
        """Start preparing these pairs, which will be needed."""
        for pair in pairs:
            if pair not in self and pair not in self._waiting:
                self._waiting[pair] = []
                self._pool.submit(0, lambda pair=pair: self._make_ready(pair), self._reporter(pair))  # type: ignore[misc]

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, as soon as no kernel is being prepared; at once if none is now."""
        if self._waiting:
            self._when_done.append(callback)
        else:
            callback()

    def submit(self, pair: Pair, priority: int, work: Work, done: Done) -> None:
        """``ThreadPool.submit`` as soon as the pair's kernel is ready, so that no pool thread waits for a compiler.

        ``done`` may be called by any thread.
        """
        if pair in self:
            self._pool.submit(priority, work, done)
        else:
            self.expect([pair])
            self._waiting[pair].append((priority, work, done))

    def run(self, work: Work, done: Done) -> None:
        """Run work that makes its kernels ready itself. ``done`` may be called by any thread."""
        self._pool.submit(0, work, done)

    def _make_ready(self, pair: Pair) -> None:
        """Any thread."""
        op, dtype, *rest = pair
        if self._prepare_codec is not None and rest and isinstance(rest[0], Codec):
            self._prepare_codec(rest[0], dtype)
        else:
            self._prepare([(op, dtype)], *rest)

    def _reporter(self, pair: Pair) -> Done:
        return lambda error: self._loop.post(lambda: self._prepared(pair, error))

    def _prepared(self, pair: Pair, error: BaseException | None) -> None:
        waiting = self._waiting.pop(pair)
        if error is None:
            self._ready.add(pair)
            for priority, work, done in waiting:
                self._pool.submit(priority, work, done)
        else:
            for _, _, done in waiting:
                done(error)
            self._failed(error)
        if not self._waiting:
            callbacks, self._when_done = self._when_done, []
            for callback in callbacks:
                callback()
