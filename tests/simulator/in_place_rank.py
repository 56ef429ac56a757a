"""A rank that has the same number in each group, and goes on with the latest step that one of the ranks has.

Does what in_place.py of the hosted optimizers does, with a number of steps as its state, which lies in each rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from byteps_py.errors import BytePSError
from byteps_py.system.machine import local_socket
from byteps_py.tensors import DType, Op, TensorSpec

from .elastic_rank import ElasticRank
from .groups import STEPS, Book
from .memory import Bytes
from .turn import Life
from .uses import Use
from .world import InvariantError

_LOOKS_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Latest(Use):
    """The largest number of steps. ``steps``: by rank."""

    steps: dict[int, int] = field(default_factory=dict)

    def contribution(self, rank: int) -> Bytes:
        return np.array([self.steps[rank]], np.int64).view(np.uint8)


class InPlaceBook(Book):
    """``steps``: by rank, its own. ``has_state``: a rank came with the state of an earlier group."""

    def __init__(self, seed: int, number: int, local_sizes: list[int]) -> None:
        super().__init__(seed, number, local_sizes)
        self.steps: dict[int, int] = {}
        self.has_state = False

    def say(self, rank: int, step: int) -> Latest:
        self.steps[rank] = step
        spec = TensorSpec("state", DType.INT64, (1,), Op.MAX)
        use = Latest(-1, spec.name, (spec,) * self.size, steps=self.steps)
        self.results[use.id] = np.array([max(self.steps.values())], np.int64).tobytes()
        return use


class InPlaceRank(ElasticRank):
    """``place``: the number that it has in every group."""

    place: int
    has_failed = False

    @property
    def is_done(self) -> bool:
        return self.exit_code == 0 and self.has_finished and not self.has_failed

    @property
    def is_ending(self) -> bool:
        """It is in its last step, or has made it."""
        return self._step >= STEPS - 1

    def _join_job(self) -> Life:
        """Its communication service may have yet to come."""
        due_s = self.world.now_s + self._settings.start_timeout_s
        while self._is_alone and self.world.now_s < due_s:
            self.doing = "waiting for its communication service"
            yield _LOOKS_EVERY_S
        yield from super()._join_job()

    @property
    def _is_alone(self) -> bool:
        listener = self._local.listeners.get(local_socket(self._settings, "cs"))
        return listener is None or not listener.process.is_alive

    def _enter(self) -> Life:
        yield from super()._enter()
        if self.number != self.place:
            raise InvariantError(f"{self.name} is rank {self.number} of group {self.book.number}, and was {self.place}")
        book = self._in_place_book
        book.has_state = book.has_state or bool(self.synced_in)
        if self.synced_in and not self.session.is_under_way:
            raise InvariantError(f"{self.name} has a state, and is told in group {book.number} that training begins")

    @property
    def _in_place_book(self) -> InPlaceBook:
        if not isinstance(self.book, InPlaceBook):
            raise AssertionError("it has another book")
        return self.book

    def _sync(self, book: Book) -> Life:
        """All ranks are there then."""
        book = self._in_place_book
        yield from self._go([book.say(self.number, self.committed)])
        self._step = self.committed = max(book.steps.values())
        if self.session.is_under_way != book.has_state:
            said = "under way" if self.session.is_under_way else "about to begin"
            raise InvariantError(f"{self.name} is told in group {book.number} that training is {said}")

    def _fail(self, error: BytePSError) -> None:
        """Its launcher starts it again."""
        if not self.has_reason():
            raise InvariantError(f"{self.name}, {self.doing}: {error!r}")
        self.say(f"fails with {type(error).__name__}: {error}")
        self.has_failed = True
        self._leave()
