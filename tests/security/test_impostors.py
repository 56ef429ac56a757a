"""Another user has the port of a scheduler or of a server that is gone: he sees no token, and nobody believes him.

The jobs have the secret that bpslaunch makes for a job on one machine; those with BYTEPS_SECRET are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import os
import queue
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
import zmq
from support.schedulers import TIMEOUT_S, Member, Scheduler, as_server, as_worker

from byteps_py import errors
from byteps_py.config.settings import Settings
from byteps_py.dataplane.listener import DataListener, Peer
from byteps_py.dataplane.traffic import Traffic
from byteps_py.kernels.update_rules import Decay, Method, StepKind, UpdateRule
from byteps_py.launch.process_plan import free_port
from byteps_py.proto import control_pb2 as pb, control_pb2_grpc
from byteps_py.scheduler import query
from byteps_py.security import auth, tls
from byteps_py.shadow import RestorablePartition, RestorableRecord, ShadowReader
from byteps_py.system import machine
from byteps_py.system.loop import EventLoop
from byteps_py.tensors import DType
from byteps_py.wire.data_link import READER_KINDS, Header, HeldRun, Kind, ShadowDescription, ShadowRecord

SECRET = "5" * 64
KIND = StepKind(UpdateRule(Method.SGD, Decay.NONE), DType.FLOAT32, DType.FLOAT32)
OTHER_USER = 12345
TO_BE_UNPICKLED = b"to be unpickled"


@pytest.fixture(autouse=True, scope="module")
def _grpc_library() -> Iterator[None]:
    """gRPC's own descriptors live as long as any channel does: keep one, so that no test seems to leak them."""
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        call = channel.unary_unary("/warm/up")
        with contextlib.suppress(grpc.RpcError):
            call(b"", timeout=0.05)
        yield


class Impostor(control_pb2_grpc.SchedulerServicer):
    """Answers as a scheduler does, and keeps the metadata of each call."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def Attend(self, requests: object, context: grpc.ServicerContext) -> Iterator[pb.SchedulerMessage]:  # noqa: N802
        self.seen.append(dict(context.invocation_metadata()))
        yield pb.SchedulerMessage(refused=pb.Refused(error="RendezvousError", message="believed", unknown=True))

    def Status(self, request: object, context: grpc.ServicerContext) -> pb.StatusReply:  # noqa: N802
        self.seen.append(dict(context.invocation_metadata()))
        return pb.StatusReply(reason="believed")


class ServerImpostor:
    """Listens as a server does, lets everybody in, and answers what he is asked. ``seen``: what that was."""

    def __init__(self, settings: Settings, user: int | None = None) -> None:
        self.seen: list[Kind] = []
        own_user = os.geteuid()
        if user is not None:
            os.seteuid(user)
        try:
            self._listener = DataListener(
                "127.0.0.1", settings, Traffic(), READER_KINDS, self._asked, lambda peer: None
            )
        finally:
            os.seteuid(own_user)
        self._listener._authenticator._is_valid = lambda nonce, password: True  # type: ignore[method-assign]
        self.address = self._listener.address

    def _asked(self, header: Header, peer: Peer, payload: zmq.Frame) -> None:
        self.seen.append(header.kind)
        said = TO_BE_UNPICKLED
        if header.kind is Kind.DESCRIBE_STATES:
            record = ShadowRecord(run=1, rank=0, size=1, step=1, attached_bytes=len(TO_BE_UNPICKLED))
            said = ShadowDescription((HeldRun(run=1, records=(record,)),)).pack()
        peer.answer(header, zmq.Frame(said))

    def __enter__(self) -> ServerImpostor:
        self._loop = EventLoop()
        self._listener.attach(self._loop)
        self._thread = threading.Thread(target=self._loop.run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.stop()
        self._thread.join(TIMEOUT_S)
        self._listener.detach(self._loop)
        self._listener.close()
        self._loop.close()


@contextlib.contextmanager
def impostor(port: int, key: bytes = b"") -> Iterator[Impostor]:
    """Listens on ``port``: without TLS, or with certificates that he makes from another key."""
    who = Impostor()
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    control_pb2_grpc.add_SchedulerServicer_to_server(who, server)
    if key:
        own = tls.credentials(key)
        server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([(own.private_key, own.certificate)]))
    else:
        server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield who
    finally:
        server.stop(0).wait(TIMEOUT_S)


@contextlib.contextmanager
def scheduler(**changes: object) -> Iterator[Scheduler]:
    running = Scheduler(**changes)
    try:
        yield running.wait_listening()
    finally:
        running.close()


@contextlib.contextmanager
def member(settings: Settings, register: pb.Register) -> Iterator[Member]:
    here = Member(settings, register)
    try:
        yield here
    finally:
        here.link.away_close_s = 0.0  # type: ignore[attr-defined]
        here.close()


@pytest.mark.parametrize("key", [b"", b"what another user makes up"], ids=["without TLS", "TLS of another key"])
def test_who_takes_the_schedulers_port_after_a_crash_is_not_believed(key: bytes) -> None:
    with scheduler(num_workers=1, local_secret=SECRET) as job, member(job.settings, as_worker()) as worker:
        worker.wait("welcome")
        assert query.status(job.settings, TIMEOUT_S).members
        job.kill()
        with impostor(job.settings.scheduler_port, key) as he:
            assert isinstance(worker.away.get(timeout=TIMEOUT_S), errors.PeerLostError)
            with pytest.raises(errors.RendezvousError, match="could not prove to each other"):
                query.status(job.settings, TIMEOUT_S)
            assert he.seen == []
        job._start()
        assert worker.back.acquire(timeout=TIMEOUT_S)
        with pytest.raises(queue.Empty):
            worker.lost.get_nowait()


def test_what_travels_to_the_schedulers_port_is_encrypted() -> None:
    settings = Settings(
        scheduler_host="127.0.0.1", scheduler_port=free_port(), local_secret=SECRET, job_id="a job's name"
    )
    with socket.create_server(("127.0.0.1", settings.scheduler_port)) as port, member(settings, as_worker()):
        connection, _ = port.accept()
        connection.settimeout(TIMEOUT_S)
        with connection:
            heard = connection.recv(1 << 16)
            connection.sendall(bytes.fromhex("000006040000000000000300000064000400100000"))  # HTTP/2: SETTINGS
            with contextlib.suppress(OSError):
                while more := connection.recv(1 << 16):
                    heard += more
    assert heard.startswith(b"\x16\x03"), "no TLS handshake"
    for word in (auth.token(settings, "control"), SECRET, settings.job_id):
        assert word.encode() not in heard


def test_without_its_secret_the_port_of_a_job_of_bpslaunch_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scheduler(num_workers=1, local_secret=SECRET) as job:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # another user does not read the job's note
        for secret in ("", "6" * 64):
            settings = dataclasses.replace(job.settings, local_secret=secret)
            with pytest.raises(errors.RendezvousError, match="BYTEPS_SECRET"):
                query.stop(settings, "no", TIMEOUT_S)
        assert query.status(job.settings, TIMEOUT_S).members == []


@pytest.mark.parametrize(
    ("changes", "most_bytes"),
    [
        pytest.param({"local_secret": SECRET}, 12 << 20, id="HTTP/2 is not spoken with strangers"),
        pytest.param({}, 24 << 20, id="without any secret"),
    ],
)
def test_streams_that_strangers_begin_and_reset_cost_little(changes: dict[str, Any], most_bytes: int) -> None:
    """A hundred connections begin and reset 2,300 streams each, in 64 KB. How many calls may wait is limited."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload

    def field(name: bytes, value: bytes) -> bytes:
        return b"\x40" + bytes((len(name),)) + name + bytes((len(value),)) + value

    fields = {b":path": b"/byteps.Scheduler/Attend", b":authority": b"x", b"content-type": b"application/grpc"}
    call = b"\x83\x86" + b"".join(field(*each) for each in fields.items()) + field(b"te", b"trailers")
    says = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
    for stream in range(1, 4600, 2):
        says += frame(1, 4, stream, call) + frame(3, 0, stream, (8).to_bytes(4, "big"))
        call = b"\x83\x86\xbe\xbf\xc0\xc1"  # the same, by the numbers that the first call has given its fields
    with scheduler(num_workers=1, **changes) as job, contextlib.ExitStack() as stack:
        assert query.status(job.settings, TIMEOUT_S).members == []
        before = resident_bytes(job.process.pid)
        for _ in range(100):
            place = ("127.0.0.1", job.settings.scheduler_port)
            one = stack.enter_context(socket.create_connection(place, TIMEOUT_S))
            with contextlib.suppress(OSError):  # it has hung up already
                one.sendall(says)
        assert query.status(job.settings, TIMEOUT_S).members == []
        assert resident_bytes(job.process.pid) - before < most_bytes


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def served_by(he: ServerImpostor, secret: str) -> Iterator[ShadowReader]:
    """A reader of a job whose only server had the port of ``he``."""
    server = as_server()
    server.address = he.address
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(scheduler(num_workers=1, num_servers=1, local_secret=secret, job_id="one"))
        worker = stack.enter_context(member(job.settings, as_worker()))
        stack.enter_context(member(job.settings, server))
        worker.wait("membership")
        yield stack.enter_context(ShadowReader(job.settings, TIMEOUT_S))


@pytest.mark.parametrize(
    ("secret", "user", "why"),
    [
        pytest.param(SECRET, None, "could not prove that it belongs to this cluster", id="another secret"),
        pytest.param(
            "", OTHER_USER, "is not a server of this job", id="no secret at all",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user"),
        ),
    ],
)  # fmt: skip
def test_who_takes_the_port_of_shadowed_states_is_asked_nothing_and_is_not_read(
    secret: str, user: int | None, why: str
) -> None:
    made_up = Settings(job_id="one", local_secret=secret and "6" * 64)
    with ServerImpostor(made_up, user) as he, served_by(he, secret) as reader:
        [described] = reader.describe()
        assert described.address == he.address
        assert not described.description.runs
        assert why in described.error
        part = RestorablePartition(he.address, 1, 0, 0, KIND, range(2), 0, 1)
        with pytest.raises(errors.RendezvousError):
            reader.read_into(part, 0, range(2), memoryview(bytearray(2 * part.kind.state_itemsize)))
        record = RestorableRecord(he.address, 1, 1, 0, 1, len(TO_BE_UNPICKLED), b"")
        with pytest.raises(errors.RendezvousError):
            reader.read_attached(record)
        assert he.seen == []


def test_a_server_of_this_user_is_read_without_a_secret() -> None:
    with ServerImpostor(Settings(job_id="one")) as he, served_by(he, "") as reader:
        [described] = reader.describe()
    assert not described.error
    assert described.description.runs
    assert he.seen == [Kind.DESCRIBE_STATES]


def test_the_doctest_of_machine() -> None:
    assert doctest.testmod(machine).failed == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_the_owner_of_a_port_is_found_at_any_address(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        assert machine.belongs_to_this_user(f"[::1]:{port}" if ":" in host else f"127.0.0.1:{port}")
    assert not machine.belongs_to_this_user(f"127.0.0.1:{port}")
    assert not machine.belongs_to_this_user("nobody.invalid:1")
