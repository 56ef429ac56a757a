"""The sockets between the ranks of one machine: each rank has an inbox, to which the others write.

An inbox is an unnamed pair of sockets; a process that holds its other end may write. Messages arrive whole, and those
of one sender in order. A sender never blocks: messages that the socket of a busy receiver does not take are kept, and a
thread that lives only until then sends them.

``PeerDirectory`` introduces the ranks to each other. Each asks the communication service, which gives every rank the
descriptors of the others' inboxes once all of them have asked (worker/core/local_ranks.py). Ranks of other
machines need no introduction: peer_connector.py connects to them. Must not know the messages of ranks. Any thread.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from byteps_py.errors import CommunicationError
from byteps_py.session.peers.waiting import Host, PeerWaiter, Wait
from byteps_py.system.log import logger
from byteps_py.tensors import key_of
from byteps_py.wire import rank_link as protocol

MAX_MESSAGE = 192 << 10
_ANCILLARY_BYTES = socket.CMSG_LEN(4 * 4)
_BUFFER_BYTES = 4 << 20  # the kernel usually allows less
_POLL_MS = 250
_FLUSH_LIMIT_S = 10.0
_DONTWAIT = int(socket.MSG_DONTWAIT)


class Inbox:
    """``write_fd``: the end to which others write. One thread at a time receives."""

    def __init__(self) -> None:
        self._sock, self._write_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(OSError):
            self._write_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        # The other end stays open here: a socket without writers is always readable.
        self.buffer = memoryview(bytearray(MAX_MESSAGE))

    @property
    def write_fd(self) -> int:
        """The descriptor of the end to which others write. It stays the inbox's."""
        return self._write_end.fileno()

    def fileno(self) -> int:
        """A descriptor that is readable when a message has arrived."""
        return self._sock.fileno()

    def receive(self) -> tuple[int, int]:
        """(size of the next message in bytes, its descriptor or -1). The message is in ``buffer`` until the next call.
        (0, -1): no message has arrived."""
        try:
            nbytes, ancillary, _, _ = self._sock.recvmsg_into([self.buffer], _ANCILLARY_BYTES, _DONTWAIT)
        except BlockingIOError:
            return 0, -1
        if not ancillary:
            return nbytes, -1
        fds = array.array("i")
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(raw[: len(raw) - len(raw) % 4])
        for fd in fds[1:]:  # correct senders attach one at most
            os.close(fd)
        return nbytes, fds[0] if fds else -1

    def close(self) -> None:
        """Close both ends. Writers of other processes get an error from then on."""
        self._sock.close()
        self._write_end.close()


class PeerOutbox:
    """The way to one peer of this machine. Owns ``write_fd``, a descriptor for the peer's inbox. Any thread."""

    failure: str | None = None  # the communication service finds out when a peer of its machine has ended

    def __init__(self, write_fd: int) -> None:
        self._sock = socket.socket(fileno=write_fd)
        self._lock = threading.Lock()
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._flusher: threading.Thread | None = None
        self._closing = False
        self.announced = 0  # segments announced to the peer so far

    def send(self, message: bytes, fd: int = -1) -> None:
        """Send, now or later; a message to a peer that has ended is dropped. ``fd`` stays the caller's. Raises
        CommunicationError if the system does not accept a message of this size."""
        with self._lock:
            if self._waiting or not self._try(message, fd):
                self._waiting.append((message, os.dup(fd) if fd >= 0 else -1))
                if self._flusher is None:
                    self._flusher = threading.Thread(target=self._flush, name="byteps-outbox", daemon=True)
                    self._flusher.start()

    def _try(self, message: bytes, fd: int) -> bool:
        try:
            if fd >= 0:
                socket.send_fds(self._sock, [message], [fd], _DONTWAIT)
            else:
                self._sock.send(message, _DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:  # the peer has ended; the communication service tells the ranks that wait for it
            return True
        except OSError as error:
            if self._sock.fileno() < 0:  # closed here
                return True
            limit = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            raise CommunicationError(
                f"a message of {len(message)} bytes to another rank of this machine can't be sent ({error}); its "
                f"socket takes {limit} bytes: let net.core.wmem_max be {MAX_MESSAGE} at least"
            ) from error
        return True

    def _try_again(self, message: bytes, fd: int) -> bool:
        try:
            return self._try(message, fd)
        except CommunicationError as error:  # the call that sent it has returned; the receiver reports a stall
            logger.error("%s", error)
            return True

    def _flush(self) -> None:
        writable = select.poll()
        writable.register(self._sock, select.POLLOUT)
        while True:
            writable.poll(_POLL_MS)
            with self._lock:
                while self._waiting and (self._closing or self._try_again(*self._waiting[0])):
                    _, fd = self._waiting.popleft()
                    if fd >= 0:
                        os.close(fd)
                if not self._waiting:
                    self._flusher = None
                    return

    def close(self, is_forked: bool = False) -> None:
        """Send waiting messages, within a time limit, then close the socket. ``is_forked``: in a forked child, only
        close it."""
        flusher = self._flusher
        if flusher is not None and not is_forked:
            flusher.join(_FLUSH_LIMIT_S)
            self._closing = True
            flusher.join(2 * _POLL_MS / 1000)
        self._sock.close()


_ALL = "the ranks of this machine"
_ALL_WITHIN_S = 60.0


class PeerDirectory:
    """``me``: this rank, one of ``local_ranks``, the ranks of its machine. ``write_fd``: the end of its inbox to which
    others write."""

    def __init__(self, host: Host, waiter: PeerWaiter, me: int, local_ranks: range, write_fd: int) -> None:
        self._host = host
        self._waiter = waiter
        self._me = me
        self._local_ranks = local_ranks
        self._others = [rank for rank in local_ranks if rank != me]
        self._write_end = write_fd
        self._has_sent_inbox = False  # the service has ``write_fd``
        self._introduced: set[int] = set()
        #: All ranks of the machine have been, or will be, introduced.
        self.includes_all = False

    def request_introduction(self, name: str, others: Sequence[int]) -> None:
        """Ask to be introduced to those of ``others`` that are on this machine, which ask the same under the same name.
        Returns at once."""
        members = sorted(rank - self._local_ranks[0] for rank in {self._me, *others} if rank in self._local_ranks)
        if len(members) == 1:
            self._introduced.add(key_of(name))
            return
        fds = () if self._has_sent_inbox else (self._write_end,)
        self._has_sent_inbox = True
        self._host.send(protocol.AskIntroduction(key_of(name), tuple(members)), fds)

    def request_all_introductions(self) -> None:
        """Ask to be introduced to all ranks of the machine, which ask the same. Returns at once."""
        self.includes_all = True
        self.request_introduction(_ALL, self._others)

    def introduction_wait(self, name: str, others: Sequence[int]) -> Callable[[float], None]:
        """A function that waits, for at most the given number of seconds, until all members have asked under ``name``.
        It raises StallError, after which it may be called again, and the error that ends the session."""
        key, wait = key_of(name), Wait(f"{name}: introduction", 0, lambda: others)

        def within(timeout_s: float) -> None:
            if key not in self._introduced:
                self._waiter.until(lambda: key in self._introduced, wait, timeout_s)
                self._waiter.ended(wait)

        return within

    def wait_for_all(self) -> None:
        """Return when all ranks of the machine have called ``request_all_introductions``. Raises StallError and the
        error that ends the session."""
        self.introduction_wait(_ALL, self._others)(_ALL_WITHIN_S)

    def are_introduced(self, name: str) -> bool:
        """True if the wait of ``introduction_wait`` would return at once."""
        return key_of(name) in self._introduced

    def introduced(self, key: int) -> None:
        """The service reports that all members have asked under ``key``. Called by the reading thread."""
        self._introduced.add(key)
