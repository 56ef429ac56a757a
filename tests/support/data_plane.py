"""The far end of a summation server: what a communication service says to it, said by hand. One thread."""

from __future__ import annotations

import math
import threading
import time
from types import TracebackType

import numpy as np
import zmq

from byteps_py.config.settings import Settings
from byteps_py.dataplane.authenticator import Authenticator, show_password
from byteps_py.dataplane.handshake import CallerHandshake
from byteps_py.dataplane.seal import Seal
from byteps_py.errors import BytePSError
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.security import auth
from byteps_py.server.service import SummationService
from byteps_py.system import channel
from byteps_py.system.loop import EventLoop
from byteps_py.system.shm import Segment
from byteps_py.tensors import DType, Op
from byteps_py.wire.control_link import ControlEvents
from byteps_py.wire.data_link import HEADER_BYTES, Header, Kind

WAIT_S = 30.0


def header_for(sender: int, data: bytes, kind: Kind = Kind.PUSH, **facts: object) -> Header:
    """Round 1 of a float32 sum in epoch 1, unless told otherwise."""
    values = {"epoch": 1, "dtype": DType.FLOAT32, "op": Op.SUM, "key": 7, "generation": 1, "round": 1, **facts}
    values.setdefault("length", len(data))
    return Header(kind, sender, **values)  # type: ignore[arg-type]


class Machine:
    """One machine's connection over TCP. With ``shown`` given, that is its proof of membership."""

    def __init__(
        self,
        context: zmq.Context,
        address: str,
        index: int,
        settings: Settings,
        shown: bytes | None = None,
        known_as: str = "",  # the listener's address as it knows it, if a proxy stands before it
        group: int = 0,
    ) -> None:
        self.index, self.group = index, group
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        show_password(self.socket, settings, known_as or address)
        self.socket.connect(address)
        self._caller = CallerHandshake(settings, index, known_as or address, group)
        self.socket.send_multipart([Header(Kind.HELLO, index, group).pack(), self._caller.hello])
        self._shown = shown
        self.seals: tuple[Seal, Seal] | None = None
        self._is_welcome = False

    def challenge(self) -> bytes:
        header, text = self._frames()
        assert Header.unpack(header).kind is Kind.CHALLENGE, text
        return text

    def prove(self) -> None:
        self.answer(self.challenge())

    def answer(self, challenge: bytes) -> None:
        proof, *seals = self._caller.answer(challenge) if self._shown is None else (self._shown,)
        self.socket.send_multipart([Header(Kind.PROOF, self.index, self.group).pack(), proof])
        self.seals = tuple(seals) if seals else None
        self._is_welcome = False

    def send(self, header: Header | bytes, payload: bytes) -> None:
        if self.seals is None and self._shown is None:
            self.prove()
        self.enter()
        packed = header if isinstance(header, bytes) else header.pack()
        sealed = self.seals[0].seal(packed, payload) if self.seals else (packed, payload)
        self.socket.send_multipart(sealed)

    def enter(self) -> None:
        """Wait for the WELCOME that is due at a proof."""
        if self.seals is not None and not self._is_welcome:
            self._is_welcome = True
            assert self.receive()[0].kind is Kind.WELCOME

    def push(self, data: bytes, **facts: object) -> None:
        self.send(header_for(self.index, data, **facts), data)  # type: ignore[arg-type]

    def pull(self, length: int, **facts: object) -> None:
        header = header_for(self.index, b"", Kind.PULL, op=Op.BROADCAST, length=length, **facts)
        self.send(header, b"")

    def _frames(self) -> tuple[bytes, bytes]:
        assert self.socket.poll(WAIT_S * 1000), "the server did not answer"
        header, payload = self.socket.recv_multipart()
        return header, payload

    def receive(self) -> tuple[Header, bytes]:
        """The next message, but for what comes or not, as time passes."""
        while (message := self.receive_any())[0].kind is Kind.AWAITED:
            pass
        return message

    def receive_any(self) -> tuple[Header, bytes]:
        self.enter()
        header, payload = self._frames()
        if self.seals is not None:
            header, frame = self.seals[1].open(header, zmq.Frame(payload))
            payload = frame.bytes
        return Header.unpack(header), payload

    def result(self) -> bytes:
        header, payload = self.receive()
        assert header.kind is Kind.ANSWER, payload.decode()
        return payload

    def refusal(self) -> str:
        header, payload = self.receive()
        assert header.kind is Kind.REFUSED
        return payload.decode()

    def close(self) -> None:
        self.socket.close()


class BareListener:
    """A ROUTER that lets in who knows the secret, and has nothing behind it."""

    def __init__(self, context: zmq.Context, settings: Settings, port: int | None = None) -> None:
        self._authenticator = Authenticator(context, settings, lambda: [self.address], lambda ip: None)
        self.attach = self._authenticator.attach  # to a loop
        self.router = context.socket(zmq.ROUTER)
        self.router.linger = 0
        self._authenticator.guard(self.router)
        self.router.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.address = self.router.last_endpoint.decode()

    def __enter__(self) -> BareListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.router.close()
        self._authenticator.close()


class LocalMachine:
    """A machine's connection inside the machine, with one shared segment (number 0)."""

    def __init__(self, name: str, index: int, settings: Settings, nbytes: int = 1 << 20, shown: str | None = None):
        self.index = index
        self.segment = Segment.create(nbytes)
        self.channel = channel.connect(name, WAIT_S)
        token = auth.token(settings, "local", str(index)) if shown is None else shown
        self.channel.send(Header(Kind.HELLO, index).pack() + token.encode())

    def give_segment(self, **facts: int) -> None:
        header = Header(Kind.SEGMENT, self.index, **{"length": self.segment.nbytes, **facts})  # type: ignore[arg-type]
        self.channel.send(header.pack(), (self.segment.fd,))

    def write(self, offset: int, data: bytes) -> None:
        self.segment.view[offset : offset + len(data)] = data

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.segment.view[offset : offset + length])

    def send(self, data: bytes, kind: Kind = Kind.PUSH, **facts: object) -> None:
        self.channel.send(header_for(self.index, data, kind, **facts).pack())

    def receive(self) -> tuple[Header, str]:
        """The next message, but for what comes or not, as time passes."""
        while (message := self.receive_any())[0].kind is Kind.AWAITED:
            pass
        return message[0], message[1].decode()

    def receive_any(self) -> tuple[Header, bytes]:
        message = self.channel.receive(WAIT_S)
        assert message is not None, "the server did not answer"
        return Header.unpack(message[0][:HEADER_BYTES]), message[0][HEADER_BYTES:]

    def close(self) -> None:
        self.channel.close()
        self.segment.close()


class HandLink:
    """A control link whose other end is the test: what the scheduler would say is said with ``say``."""

    def __init__(self) -> None:
        self.sent: list[pb.MemberMessage] = []
        self.closed_because: str | None = None
        self.has_sent = threading.Event()
        self._is_away = False

    def connect(
        self,
        settings: Settings,
        register: pb.Register,
        loop: EventLoop,
        events: ControlEvents,
    ) -> HandLink:
        self.register, self._loop = register, loop
        self._on_message, self._on_lost, self._heartbeat = events.on_message, events.on_lost, events.heartbeat
        self._on_away, self._on_back = events.on_away, events.on_back
        return self

    def send(self, message: pb.MemberMessage) -> None:
        self.sent.append(message)
        if not self._is_away:
            self._hear(message)
        self.has_sent.set()

    def _hear(self, message: pb.MemberMessage) -> None:
        if message.HasField("drain"):
            self.say(stop=pb.Stop(reason="its keys have moved"))

    def close(self, reason: str) -> None:
        self.closed_because = reason

    def say(self, **body: object) -> None:
        self._loop.post(lambda: self._on_message(pb.SchedulerMessage(**body)))  # type: ignore[arg-type]

    def lose(self, error: BytePSError) -> None:
        self._loop.post(lambda: self._on_lost(error))

    def go_away(self, error: BytePSError) -> None:
        def go() -> None:
            self._is_away = True
            self.has_sent.clear()
            self._on_away(error)

        self._loop.post(go)

    def come_back(self) -> None:
        def come() -> None:
            self._is_away = False
            self._on_back()
            for message in self.sent:
                self._hear(message)

        self._loop.post(come)

    def statistics(self) -> pb.Statistics:
        """The next heartbeat's, taken in the loop's thread after what the server has received so far."""
        taken: list[pb.Statistics] = []
        done = threading.Event()

        def take() -> None:
            taken.append(self._heartbeat().statistics)
            done.set()

        self._loop.post(take)
        assert done.wait(WAIT_S)
        return taken[0]


class Server:
    """A Service in a thread, with ``num_machines`` as its membership. ``tells_awaited``: it says AWAITED, which comes
    or not, as time passes."""

    def __init__(
        self,
        settings: Settings,
        num_machines: int = 2,
        kind: pb.MachineKind = pb.MACHINE_KIND_GPU,
        service_class: type[SummationService] = SummationService,
        tells_awaited: bool = True,
    ) -> None:
        self.settings = settings
        self.link = HandLink()
        self.service = service_class(settings, kind, self.link.connect, Runtime())
        if not tells_awaited:
            self.service._rounds.awaited.after_s = math.inf
        self._bound_to = self.service.address
        self.status: int | None = None
        self.error: BytePSError | None = None
        self._context = zmq.Context()
        self._machines: list[Machine | LocalMachine] = []
        self._thread = threading.Thread(target=self._run, name="server under test")
        self._thread.start()
        if num_machines:
            self.set_members(num_machines)

    def _run(self) -> None:
        try:
            self.status = self.service.run()
        except BytePSError as error:
            self.error = error

    def set_members(self, num_machines: int, epoch: int = 1) -> None:
        workers = [pb.Member(machine_index=i) for i in range(num_machines)]
        nbytes = self.settings.partition_bytes
        servers = [pb.Member(address=self.service.address, weight=1)]
        self.link.say(membership=pb.Membership(epoch=epoch, workers=workers, servers=servers, partition_bytes=nbytes))

    def machine(self, index: int, shown: bytes | None = None, settings: Settings | None = None) -> Machine:
        known_as = self.service.address
        machine = Machine(self._context, self._bound_to, index, settings or self.settings, shown, known_as)
        self._machines.append(machine)
        return machine

    def local_machine(self, index: int, shown: str | None = None) -> LocalMachine:
        machine = LocalMachine(self.link.register.local_address, index, self.settings, shown=shown)
        self._machines.append(machine)
        return machine

    def join(self) -> int | None:
        """Wait for the end of the service; its exit status, None if it raised ``error``."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.status

    def disconnect(self) -> None:
        """End all connections of machines."""
        for machine in self._machines:
            machine.close()
        self._machines.clear()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.disconnect()
        self.service.stop("the test is over")
        self._thread.join(WAIT_S)
        self._context.term()
        assert not self._thread.is_alive()
        # A process that ends takes its threads along. Here one may go on compiling a kernel, for longer than a server
        # waits, and what the server then leaves open would be in the way of all later tests.
        deadline_s = time.monotonic() + WAIT_S
        while not self.service.has_closed and time.monotonic() < deadline_s:
            self.service._close()
        assert self.service.has_closed


def random_values(dtype: DType, count: int, seed: int) -> np.ndarray:
    """Values of many magnitudes, as the bytes that travel; bfloat16 as the upper half of float32."""
    generator = np.random.default_rng(seed)
    floats = (generator.standard_normal(count) * np.exp2(generator.integers(-6, 6, count))).astype(np.float32)
    if dtype is DType.BFLOAT16:
        return (floats.view(np.uint32) >> 16).astype(np.uint16)
    if dtype.is_floating:
        return floats.astype(dtype.name.lower())
    kind = np.dtype(dtype.name.lower())
    limits = np.iinfo(kind)
    return generator.integers(limits.min, limits.max, count, dtype=kind, endpoint=True)


def exact_sum(dtype: DType, parts: list[np.ndarray]) -> np.ndarray:
    """Left to right in the widened type, rounded once: what the server must answer, bit for bit."""
    if dtype is DType.BFLOAT16:
        total = np.zeros(1, np.float32)
        for i, part in enumerate(parts):
            wide = (part.astype(np.uint32) << 16).view(np.float32)
            total = wide if i == 0 else total + wide
        bits = total.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    wide_type = np.float32 if dtype is DType.FLOAT16 else parts[0].dtype
    total = parts[0].astype(wide_type)
    for part in parts[1:]:
        total = total + part.astype(wide_type)
    return total.astype(parts[0].dtype)
