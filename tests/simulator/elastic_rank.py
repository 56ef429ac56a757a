"""A rank of an elastic job: it goes back to its last commit, and into the next group, whenever one ends.

Does what byteps_py/torch/elastic does, with a number of steps as its state.
"""

from __future__ import annotations

from collections.abc import Callable

from byteps_py.errors import BytePSError, CommunicationError, DismissedError, StallError

from .groups import STEPS, Book
from .local import Channel
from .rank import Rank
from .turn import Life
from .world import InvariantError


class HostsUpdated(Exception):  # noqa: N818  as Horovod's
    """Machines come or go, and all ranks have heard it."""


class ElasticRank(Rank):
    """``may_fail``: it is on a machine that the job goes on without."""

    book: Book  # of the group that it was last let into
    is_job_over: Callable[[], bool]
    has_reason: Callable[[], bool]  # to go back: somebody was lost
    may_shrink: Callable[[], bool]  # the group: somebody was lost, or told to leave
    size = 0  # of the last group that it was in
    committed = 0
    may_fail = False
    has_finished = False
    wants_back = False
    commit_every = 1
    _step = 0
    _groups = 0
    _channel: Channel | None = None

    def _live(self) -> Life:
        while True:
            try:
                yield from self._enter()
            except DismissedError:
                self.say("was sent away")
                return
            try:
                yield from self._train()
                self.has_finished = self._step == STEPS
                yield from self._settle()
                if self.has_finished:
                    return
                yield from self._shut_down()
            except HostsUpdated:
                self._go_back("HostsUpdatedInterrupt", True)
            except CommunicationError as error:
                self.say(f"goes back after {type(error).__name__}: {error}")
                if not self.has_reason():
                    raise InvariantError(f"{self.name} goes back after {error!r}") from None
                self._step = self.committed
                self._go_back(type(error).__name__, False)
            yield self.pause()

    def _connect(self) -> Channel:
        before, channel = self._channel, super()._connect()
        if before is not None:  # what it said there is in the kernel's hands already
            channel.peer.wire = before.peer.wire
        return channel

    def _enter(self) -> Life:
        yield from self._join_job()
        book, self.number = self.book, self.session.rank
        self.results = book.results
        self.in_chunks.clear()
        self._groups += 1
        self.say(f"is rank {self.number} of {self.session.size} in group {book.number}")
        if self.session.size != book.size:
            raise InvariantError(f"{self.name} is told of {self.session.size} ranks, there are {book.size}")
        if book.size < self.size and not self.may_shrink():
            raise InvariantError(f"{self.name} is in a group of {book.size} ranks, and nobody left that of {self.size}")
        self.size = book.size

    @property
    def has_begun(self) -> bool:
        """It has been let into a group."""
        return self._groups > 0

    def _go_back(self, why: str, planned: bool) -> None:
        self.session.returning = (why, planned)
        self.session.close()
        self.has_joined = self.has_connected = self.wants_back = False

    def unheard_s(self) -> float:
        """Until all that it has said is in its communication service's kernel buffers."""
        heard_s = self._channel.peer.wire.last_arrival_s if self._channel is not None else 0.0
        return max(0.0, heard_s - self.world.now_s)

    def pause(self) -> float:
        if self.wants_back and self.has_joined:
            self.wants_back = False
            raise CommunicationError("this rank alone has reason to go back")
        return super().pause()

    def _shut_down(self) -> Life:
        """As all ranks do, and come again."""
        self.say("shuts down, to come again")
        self.session.close()
        self.has_joined = self.has_connected = False
        yield self.random.choice((0.0, 1.0)) * self.random.random()

    def _train(self) -> Life:
        """Until all steps are done, or all ranks are to shut down."""
        book = self.book
        if not self.session.is_continued:
            yield from self._sync(book)
        elif self._groups == 1:
            raise InvariantError(f"{self.name} is new, and told that all were in the group before")
        self.synced_in = self.session.since_epoch
        book.begin(self._step)
        while self._step < STEPS:
            at = self._step - book.first
            yield from self._go([use for use in book.program.steps[at] if use.specs[self.number] is not None])
            if at in book.program.barriers:
                yield from self._barrier()
            self._step += 1
            if self._step % self.commit_every == 0 or self._step == STEPS:
                self.committed = self._step
                yield from self._check_hosts(book)
            if self._step - book.first == book.shuts_down_after:
                self.committed = self._step
                return

    def _sync(self, book: Book) -> Life:
        use = book.state()
        if self.number == 0:
            book.tell(use, self._step)
        yield from self._go([use])
        self._step = book.words[use.id]
        if self._step < self.committed - self.commit_every:
            raise InvariantError(f"{self.name} has committed {self.committed} steps, and goes back to {self._step}")
        self.committed = self._step

    def _check_hosts(self, book: Book) -> Life:
        use = book.hosts(self._step)
        if self.number == 0:
            added, removed = self.session.hosts_changed()
            book.tell(use, 2 * added + removed)
        yield from self._go([use])
        if book.words[use.id]:
            raise HostsUpdated

    def _fail(self, error: BytePSError) -> None:
        is_late = not self.has_begun and self.is_job_over()
        # Every restart of the scheduler gives those who are missing time once more.
        is_blind = isinstance(error, StallError) and any("scheduler again" in it for it in self.world.trials)
        if is_blind:
            self.world.faults.append(f"stalled: {self.name}")
        if not (self.may_fail or is_late or self.world.faults):
            raise InvariantError(f"{self.name}, {self.doing}: {error!r}")
        self.say(f"fails with {type(error).__name__}: {error}")
        self.error = error
        self._leave()
