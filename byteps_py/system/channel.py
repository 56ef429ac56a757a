"""Messages between two processes of one machine: a Unix seqpacket socket that can also pass file descriptors.

The socket's name is in Linux's abstract namespace, so nothing is left in a file system. Abstract names have no owner
and no mode; so each end checks that the other runs as the same user. A round trip takes about 10 µs (ZeroMQ: about
95 µs). Any thread may call ``send``; ``receive`` takes one thread at a time.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import threading
import time

from byteps_py.config.variables import MAX_SOCKET_NAME_BYTES
from byteps_py.errors import ConfigurationError, PeerLostError, ProtocolError, RendezvousError
from byteps_py.wording import shown

MAX_MESSAGE = 192 << 10  # below the kernel's default socket buffer
SEND_TIMEOUT_S = 30.0
_ANCILLARY_BYTES = socket.CMSG_LEN(8 * 4)
# Plain integers: each operation on the socket module's flags costs as much as a system call.
_DONTWAIT = int(socket.MSG_DONTWAIT)
_TRUNCATED = int(socket.MSG_TRUNC) | int(socket.MSG_CTRUNC)


class _Kept(threading.local):
    """One receive buffer per thread. A new buffer for each message would cost ten times as much as receiving, and one
    per connection would let strangers make the process allocate memory."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(MAX_MESSAGE))


_kept = _Kept()


def _check_same_user(sock: socket.socket) -> int:
    """The peer's process id. Raises ProtocolError if the peer runs as another user."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise ProtocolError(f"process {pid} of user {uid} is at the other end of a socket of user {os.getuid()}")
    return int(pid)


def _address(name: str) -> bytes:
    """The address of the abstract socket ``name``. Raises ConfigurationError if the name is too long."""
    encoded = os.fsencode(name)
    if len(encoded) > MAX_SOCKET_NAME_BYTES:
        raise ConfigurationError(
            f"the local socket's name '{shown(name)}' (BYTEPS_SOCKET_NAME) has {len(encoded)} bytes; at most "
            f"{MAX_SOCKET_NAME_BYTES} fit"
        )
    return b"\0" + encoded


class Channel:
    """One end of a connection. ``peer_pid`` is the id of the process that opened the other end.

    Raises ProtocolError if the peer runs as another user.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        # The socket stays in blocking mode: a Python timeout would also apply to senders in other threads.
        seconds, fraction = divmod(SEND_TIMEOUT_S, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(fraction * 1e6)))
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self.peer_pid = _check_same_user(sock)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def send(self, data: bytes | bytearray, fds: tuple[int, ...] = ()) -> None:
        """Send one message of at most ``MAX_MESSAGE`` bytes, and duplicates of ``fds``. Waits while the peer's buffer
        is full. Any thread.

        Raises:
            PeerLostError: the peer has closed the connection, or has read nothing for ``SEND_TIMEOUT_S``.
            ProtocolError: ``data`` is too long.
        """
        if not self._send(data, fds, 0):
            raise PeerLostError(f"process {self.peer_pid} has read nothing for {SEND_TIMEOUT_S} s")

    def try_send(self, data: bytes | bytearray, fds: tuple[int, ...] = ()) -> bool:
        """Like ``send``, but return False at once if the peer's buffer is full."""
        return self._send(data, fds, _DONTWAIT)

    def _send(self, data: bytes | bytearray, fds: tuple[int, ...], flags: int) -> bool:
        if len(data) > MAX_MESSAGE:
            raise ProtocolError(f"local message of {len(data)} bytes; at most {MAX_MESSAGE} are sent")
        try:
            with self._lock:
                if fds:
                    socket.send_fds(self._sock, [data], list(fds), flags)
                else:
                    self._sock.send(data, flags)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLostError(f"process {self.peer_pid} closed its local connection ({error})") from error
        return True

    def receive(self, timeout_s: float) -> tuple[bytes, list[int]] | None:
        """Return one message and its descriptors, or None if none came within ``timeout_s`` (0: don't wait).

        The caller owns the descriptors, and closes them. One thread at a time.

        Raises:
            PeerLostError: the peer has closed the connection.
            ProtocolError: the message is longer than ``MAX_MESSAGE``.
        """
        buffer = _kept.buffer
        try:
            if timeout_s > 0 and not self._readable.poll(timeout_s * 1000):
                return None
            try:
                nbytes, ancillary, flags, _ = self._sock.recvmsg_into([buffer], _ANCILLARY_BYTES, _DONTWAIT)
            except ConnectionResetError:  # the peer closed with unread messages; its own can still be received
                nbytes, ancillary, flags, _ = self._sock.recvmsg_into([buffer], _ANCILLARY_BYTES, _DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            raise PeerLostError(f"process {self.peer_pid} closed its local connection ({error})") from error
        if not ancillary and nbytes and not flags & _TRUNCATED:  # nearly all messages
            return buffer[:nbytes].tobytes(), []
        fds: list[int] = []
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds += array.array("i", raw[: len(raw) - len(raw) % 4])
        if not nbytes or flags & _TRUNCATED:
            for fd in fds:  # the caller does not get them
                os.close(fd)
        if not nbytes:
            raise PeerLostError(f"process {self.peer_pid} closed its local connection")
        if flags & _TRUNCATED:
            raise ProtocolError(f"a local message of process {self.peer_pid} was truncated")
        return buffer[:nbytes].tobytes(), fds

    def shutdown(self) -> None:
        """End the connection, also for other processes that hold this socket. Each end still receives the messages that
        were sent before, and then the end of the connection."""
        with contextlib.suppress(OSError):  # the peer has ended it already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor."""
        self._sock.close()


class Listener:
    """Accepts channels under an abstract name.

    Raises ConfigurationError if the name is too long, and RendezvousError if another process listens under it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        address = _address(name)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._sock.bind(address)
        except OSError as error:
            self._sock.close()
            raise RendezvousError(
                f"the local socket {name!r} is taken: another process already has this role in this job ({error})"
            ) from error
        self._sock.listen(128)

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> Channel:
        """Accept a connection. Raises ProtocolError, and closes it, if it is another user's."""
        sock, _ = self._sock.accept()
        try:
            return Channel(sock)
        except ProtocolError:
            sock.close()
            raise

    def close(self) -> None:
        self._sock.close()


def connect(name: str, timeout_s: float) -> Channel:
    """Connect to the listener ``name``. Waits up to ``timeout_s`` until it listens, then raises RendezvousError.

    >>> listener = Listener(f"byteps-example-{os.getpid()}")
    >>> here = connect(listener.name, timeout_s=1.0)
    >>> there = listener.accept()
    >>> here.send(b"hello")
    >>> there.receive(timeout_s=1.0)
    (b'hello', [])
    >>> for end in (here, there, listener):
    ...     end.close()
    """
    address = _address(name)
    deadline = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(address)
            return Channel(sock)
        except (ConnectionRefusedError, FileNotFoundError):
            sock.close()
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"no process of this job listens at the local socket {name!r} after {timeout_s:g} s"
                ) from None
            time.sleep(0.005)
        except BaseException:
            sock.close()
            raise
