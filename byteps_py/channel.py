"""Messages between two processes of one machine: a Unix seqpacket socket that can carry descriptors.

The name lies in the abstract namespace, so nothing is left in a file system. Abstract names have no owner
and no mode; both ends therefore check that the other runs as the same user. A round trip costs about 10 µs
(ZeroMQ: about 95 µs). ``send`` may be called by any thread, ``receive`` by one at a time.
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

from byteps_py.errors import ConfigurationError, PeerLostError, ProtocolError, RendezvousError
from byteps_py.validators import MAX_SOCKET_NAME_BYTES, shown

MAX_MESSAGE = 192 << 10  # below the kernel's default socket buffer
SEND_TIMEOUT_S = 30.0
_ANCILLARY_BYTES = socket.CMSG_LEN(8 * 4)
# Plain integers: each operation on the socket module's flags costs as much as a system call.
_DONTWAIT = int(socket.MSG_DONTWAIT)
_TRUNCATED = int(socket.MSG_TRUNC) | int(socket.MSG_CTRUNC)


class _Kept(threading.local):
    """One buffer per thread: a fresh one for each message would cost ten times what receiving it does, and one for
    each connection would be memory that a stranger gets for nothing."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(MAX_MESSAGE))


_kept = _Kept()


def _check_same_user(sock: socket.socket) -> int:
    """The peer's pid. Raises ProtocolError if it runs as another user."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise ProtocolError(f"process {pid} of user {uid} is at the other end of a socket of user {os.getuid()}")
    return int(pid)


def _address(name: str) -> bytes:
    """That of an abstract socket. Raises ConfigurationError if the name is too long for one."""
    encoded = os.fsencode(name)
    if len(encoded) > MAX_SOCKET_NAME_BYTES:
        raise ConfigurationError(
            f"the local socket's name '{shown(name)}' (BYTEPS_SOCKET_NAME) has {len(encoded)} bytes; at most "
            f"{MAX_SOCKET_NAME_BYTES} fit"
        )
    return b"\0" + encoded


class Channel:
    """One connected end. ``peer_pid`` is the process that opened the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        # The socket stays in blocking mode: a Python timeout would apply to senders in other threads too.
        seconds, fraction = divmod(SEND_TIMEOUT_S, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(fraction * 1e6)))
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self.peer_pid = _check_same_user(sock)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, data: bytes | bytearray, fds: tuple[int, ...] = ()) -> None:
        """Waits while the peer's buffer is full. Raises PeerLostError when the peer is gone, or has taken
        nothing for ``SEND_TIMEOUT_S``."""
        if not self._send(data, fds, 0):
            raise PeerLostError(f"process {self.peer_pid} has read nothing for {SEND_TIMEOUT_S} s")

    def try_send(self, data: bytes | bytearray, fds: tuple[int, ...] = ()) -> bool:
        """Like ``send``, but False at once when the peer's buffer is full."""
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
        """One message and its descriptors; None when ``timeout_s`` passed without one (0: don't wait).

        Raises PeerLostError when the other end is gone.
        """
        buffer = _kept.buffer
        try:
            if timeout_s > 0 and not self._readable.poll(timeout_s * 1000):
                return None
            try:
                nbytes, ancillary, flags, _ = self._sock.recvmsg_into([buffer], _ANCILLARY_BYTES, _DONTWAIT)
            except ConnectionResetError:  # the peer closed before it had read all; what it had sent is still to come
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
            for fd in fds:  # nobody will
                os.close(fd)
        if not nbytes:
            raise PeerLostError(f"process {self.peer_pid} closed its local connection")
        if flags & _TRUNCATED:
            raise ProtocolError(f"a local message of process {self.peer_pid} was truncated")
        return buffer[:nbytes].tobytes(), fds

    def shutdown(self) -> None:
        """End the connection, for all processes that share it: both ends read what was sent before, then its end."""
        with contextlib.suppress(OSError):  # the peer has ended it
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


class Listener:
    """Accepts channels under an abstract name."""

    def __init__(self, name: str) -> None:
        self.name = name
        address = _address(name)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._sock.bind(address)
        except OSError as error:
            self._sock.close()
            raise RendezvousError(
                f"the local socket {name!r} is taken: another process already plays this part of this job ({error})"
            ) from error
        self._sock.listen(128)

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> Channel:
        """Raises ProtocolError when another user's process knocks; it is turned away."""
        sock, _ = self._sock.accept()
        try:
            return Channel(sock)
        except ProtocolError:
            sock.close()
            raise

    def close(self) -> None:
        self._sock.close()


def connect(name: str, timeout_s: float) -> Channel:
    """Connect to the listener ``name``, waiting up to ``timeout_s`` for it to come. Raises RendezvousError."""
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
