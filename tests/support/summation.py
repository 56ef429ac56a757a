"""What tests of a running summation server share."""

from __future__ import annotations

from byteps_py.config.settings import Settings
from byteps_py.wire.data_link import Kind
from support.data_plane import LocalMachine, Machine, Server

SETTINGS = Settings(
    scheduler_host="127.0.0.1",
    scheduler_port=9999,  # nobody is there: the tests' links have no other end
    node_host="127.0.0.1",
    job_id="test",
    secret="known to members",
    num_workers=3,
    partition_bytes=256 << 10,
    server_threads=2,
)


def assert_works(server: Server, zero: Machine | LocalMachine) -> None:
    """A round of machine 0, as given, and a fresh machine 1."""
    one = server.machine(1)
    if isinstance(zero, LocalMachine):
        zero.write(0, b"\0\0\x80?")
        zero.send(b"\0\0\x80?", key=1234, answer_offset=4096)
    else:
        zero.push(b"\0\0\x80?", key=1234)
    one.push(b"\0\0\0@", key=1234)
    assert one.result() == b"\0\0@@"
    assert zero.receive()[0].kind is Kind.ANSWER
