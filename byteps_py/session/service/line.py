"""The channel between a rank and its communication service. It has no thread of its own: whoever waits reads, for all.

The GIL is free while somebody waits. Any thread may call; a forked child may not, and is told so.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable

from byteps_py import rank_protocol as protocol
from byteps_py.channel import Channel
from byteps_py.errors import BytePSError, NotInitializedError, PeerLostError, ProtocolError, StallError
from byteps_py.rank_protocol import RankMessageKind
from byteps_py.session import forks, words
from byteps_py.session.base import Session
from byteps_py.session.peers import LocalPeers


class Line(Session):
    """``state`` guards all that messages change; one waiter at a time reads. A service that is silent for ``silence_s``
    while it is needed counts as lost."""

    def __init__(self, channel: Channel, silence_s: float) -> None:
        self._channel = channel
        self._silence_s = silence_s
        self._forks = forks.count
        self._is_welcome = False  # before that, the service hears nobody
        self._is_asked = False  # whether it is alive
        self._fatal: BytePSError | None = None
        self._closed = False
        self._reading = False
        self.state = threading.Condition()
        self._local_peers: LocalPeers | None = None
        self._readable: select.poll | None = None  # the channel and the peers' messages, once they are needed

    @abstractmethod
    def _handle(self, message: bytes, fds: list[int]) -> None:
        """A message has come. Called with ``state`` held."""

    @property
    def is_forked(self) -> bool:
        """This is a child of the process whose rank it was."""
        return self._forks != forks.count

    @property
    def peers(self) -> LocalPeers | None:
        with self.state:
            if self._local_peers is None and self.local_size > 1:
                first_rank = self.rank - self.local_rank
                self._local_peers = LocalPeers(self, self.local_rank, self.local_size, first_rank)
                self._readable = select.poll()
                for fd in (self._channel.fileno(), self._local_peers.fileno()):
                    self._readable.register(fd, select.POLLIN)
            return self._local_peers

    @property
    def is_being_read(self) -> bool:
        return self._reading

    def tell(self, message: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send to the service."""
        self.check_open()
        try:
            self._channel.send(message, fds)
        except PeerLostError as lost:
            with self.state:
                while not self._reading and self._read(0):
                    pass  # its last words say why
                self._fail(lost)
            self.check_open()

    def check_open(self) -> None:
        if self._fatal is not None:
            raise type(self._fatal)(*self._fatal.args)
        if self._closed:
            raise NotInitializedError("the session is closed; call byteps_py.init() first")
        if self.is_forked:
            raise words.forked(getattr(self, "rank", "?"))

    def wait_until(
        self, condition: Callable[[], bool], timeout_s: float | None, waiting_for: Callable[[], str]
    ) -> None:
        """Read, or let another thread do so, until ``condition``. Raises StallError after ``timeout_s``, and what ends
        the session; either says what was waited for."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self.state:
            while not condition():
                if self._fatal is not None and self._is_welcome:
                    raise words.while_waiting(self._fatal, waiting_for())
                self.check_open()
                left = 3600.0 if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise StallError(f"{waiting_for()} within {timeout_s:g} s")
                if self._reading:
                    self.state.wait(left)
                elif not self._is_welcome:
                    self._read(left)
                else:
                    self._read_or_ask(left)

    def _read_or_ask(self, timeout_s: float) -> None:
        """Like ``_read``; and when the service has been silent for long, ask whether it is alive. A service that
        is gone closes the channel, but one that is frozen does nothing."""
        patience_s = self._silence_s / 2
        if self._read(min(timeout_s, patience_s)):
            self._is_asked = False
        elif timeout_s > patience_s and self._fatal is None and not self._closed:
            if self._is_asked:
                self._fail(words.frozen(self._channel.peer_pid, self._silence_s))
            self._is_asked = True
            with contextlib.suppress(PeerLostError):  # the next read finds that out
                self._channel.try_send(protocol.pack(RankMessageKind.PING))

    def _read(self, timeout_s: float) -> bool:
        """Take one message. Called with the lock held, which is free while the channel is waited for."""
        self._reading = True
        try:
            message, came = None, False
            peers, readable = self._local_peers, self._readable
            ready: Iterable[int] = ()
            if timeout_s:
                self.state.release()
            try:
                if peers is None or readable is None:
                    message = self._channel.receive(timeout_s)
                else:
                    ready = [fd for fd, _ in readable.poll(timeout_s * 1000)]
            finally:
                if timeout_s:
                    self.state.acquire()
            if peers is not None and ready and not self._closed:
                if peers.fileno() in ready:
                    came = peers.take_message()
                if self._channel.fileno() in ready:
                    message = self._channel.receive(0)
            if message is not None:
                self._handle(*message)
            return came or message is not None
        except PeerLostError:
            if not self._closed:
                self._fail(words.gone(self._channel.peer_pid))
            return False
        except ProtocolError as error:
            self._fail(error)
            return False
        finally:
            self._reading = False
            self.state.notify_all()

    def _fail(self, error: BytePSError) -> None:
        if self._fatal is None:
            self._fatal = error
