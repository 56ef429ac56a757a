"""What one connection of a link still has to deliver."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any, cast

from byteps_py.dataplane.seal import Protection, new_stream_seal
from byteps_py.session.peers.link_socket import LinkSocket
from byteps_py.session.peers.peer_connector import NewConnection


def test_nothing_is_left_to_deliver_over_a_connection_that_the_other_end_has_reset() -> None:
    """A rank that leaves would wait for it as long as for a network that has failed: over a long link, others have
    ended before they acknowledge its last bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as here:
        there, _ = listener.accept()
        here.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                here.send(bytes(1 << 16))  # until neither system has room for more: some are not acknowledged
        seals = new_stream_seal(Protection.OPEN, b""), new_stream_seal(Protection.OPEN, b"")
        link_socket = LinkSocket(NewConnection(here, seals, 1, 0), cast(Any, None), cast(Any, None))
        assert link_socket.undelivered_bytes > 0
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it ends with a reset
        there.close()
        assert link_socket.undelivered_bytes == 0
