"""A TCP proxy that a test can cut: a network between two processes that both live. Two threads per connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Proxy:
    """Stands before ``target`` (host, port). ``on_accept``: called, in a thread, with how many have connected.

    ``alter``, if set: what the target (False) or who has connected (True) says, as it goes on. ``alter_of``: the same,
    for one that is also given the socket that says it. ``most_bytes``: of one piece.
    """

    def __init__(self, target: tuple[str, int], on_accept: Callable[[int], None] = lambda count: None) -> None:
        self._target = target
        self._on_accept = on_accept
        self.alter: Callable[[bytes, bool], bytes] | None = None
        self.alter_of: Callable[[bytes, bool, socket.socket], bytes] | None = None
        self.most_bytes = 1 << 16
        self.has_cut = threading.Event()
        self.sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._cut_at: bytes | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def cut(self) -> None:
        """End every connection."""
        for end in self.sockets:
            with contextlib.suppress(OSError):  # it has ended already
                end.shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """Take no more connections, and end those there are."""
        self.refuse_more()
        self.cut()

    def refuse_more(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def cut_at(self, word: bytes) -> None:
        """End every connection when the target next says ``word``, which is lost."""
        self._cut_at = word

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        for count in range(1, 1000):
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:  # the target is gone: as it would be for its caller
                client.close()
                continue
            self.sockets += [client, server]
            self._start(self._carry, client, server, True)
            self._start(self._carry, server, client, False)
            self._on_accept(count)

    def _carry(self, source: socket.socket, sink: socket.socket, is_client: bool) -> None:
        with contextlib.suppress(OSError):  # one of both ends was cut
            while data := source.recv(self.most_bytes):
                if not is_client and self._cut_at is not None and self._cut_at in data:
                    self._cut_at = None
                    self.cut()
                    self.has_cut.set()
                    break
                if self.alter_of is not None:
                    data = self.alter_of(data, is_client, source)
                sink.sendall(self.alter(data, is_client) if self.alter is not None else data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self.sockets):
            end.close()
