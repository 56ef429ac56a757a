"""Connections of a job that a thread makes while the rank goes on: those between machines, and the next session.

``JobConnections`` connects all ranks of a job that are on different machines, in the background when the job begins:
for sums by name (negotiated.py) and for gathers (peer_gathers.py).

Any rank may be late or absent at these, so ranks must know beforehand whether all of them are connected. They
exchange addresses, connect, and then tell each other whether that has succeeded. ``record_of`` and the functions after
it are for process groups, too.

``NextSession`` waits to be part of the next group of an elastic job while the rank trains by itself.
"""

from __future__ import annotations

import contextvars
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, CommunicationError, ConfigurationError, StallError
from byteps_py.session import Session
from byteps_py.system.log import logger
from byteps_py.tensors import Layout, Op, Sizes
from byteps_py.torch.collectives.all_reduce import shared_memory
from byteps_py.torch.collectives.movers import MoverOf
from byteps_py.torch.collectives.router import ConnectedMachines
from byteps_py.torch.collectives.slot_view import SlotView

#: The index of the machine; the number of spare machines; whether the instructions for sums in shared memory are
#: compiled; the address, empty if the rank can't be connected to.
_RECORD = struct.Struct("<II?503s")
RECORD_BYTES = _RECORD.size
_ADDRESS_BYTES = 500
_CPU = torch.device("cpu")
#: For the connections. Ranks that can't connect go through the services.
_CONNECT_S = 10.0
_YES, _NO = b"\1", b"\0"


class JobConnections:
    """The connections of a session's rank. Any thread."""

    def __init__(self, session: Session, settings: Settings, mover_of: MoverOf) -> None:
        self._session = session
        self._settings = settings
        self._view = SlotView(session, mover_of)
        self._is_done = threading.Event()
        self._machines: ConnectedMachines | None = None
        self._error: BytePSError | None = None
        self._why_not = ""  # of this rank, for the first sum that can't use them: no other user needs to know
        threading.Thread(target=self._run, name="byteps-connections", daemon=True).start()

    @property
    def machines(self) -> ConnectedMachines | None:
        """The machines of the job, if all ranks are connected; otherwise None. The same on all ranks. Waits until that
        is known. Raises StallError and the error that has ended the session."""
        if not self._is_done.wait(self._settings.start_timeout_s + 2 * _CONNECT_S):
            raise StallError("not all ranks have connected to each other: some have not begun, or can't go on")
        self._session.check_open()
        if self._error is not None:  # this rank lacks the addresses that the others have
            raise type(self._error)(*self._error.args)
        if self._why_not:
            why_not, self._why_not = self._why_not, ""
            logger.warning("sums by name go through the services: %s", why_not)
        return self._machines

    def finish(self) -> None:
        """Return when no rank needs this one for it any more."""
        self._is_done.wait(self._settings.start_timeout_s + 2 * _CONNECT_S)

    def _run(self) -> None:
        try:
            self._connect()
        except BytePSError as error:  # in general, the session has ended, and says so to every caller
            self._error = error
        finally:
            self._is_done.set()

    def _connect(self) -> None:
        session = self._session
        try:
            # Only where ranks may add large sums: it waits until the instructions are compiled.
            shares_memory = session.local_size > 1 and not self._settings.num_servers and shared_memory.is_able()
            record = record_of(session, self._settings, shares_memory)
        except ConfigurationError as error:
            self._why_not, record = str(error), b""
        records = self._gather(record)
        machines = machines_of(records)
        if machines is None:
            return
        has_succeeded, connector = True, session.peers.connector if session.peers is not None else None
        try:
            if connector is not None:
                connector.connect(addresses_of(records, range(session.size), session.machine_index), _CONNECT_S)
        except CommunicationError as error:
            has_succeeded, self._why_not = False, str(error)
        answers = self._gather(_YES if has_succeeded else _NO)
        if all(answer[:1] == _YES for answer in answers):
            self._machines = machines

    def _gather(self, mine: bytes) -> Sequence[bytes]:
        """The bytes of all ranks, each filled up to RECORD_BYTES."""
        size, view = self._session.size, self._view
        source = torch.frombuffer(bytearray(mine.ljust(RECORD_BYTES, b"\0")), dtype=torch.uint8)
        whole = torch.empty(size * RECORD_BYTES, dtype=torch.uint8, device="cpu")
        view.declare_bytes("connections of the job", Op.GATHER, (), RECORD_BYTES, whole.numel())
        pieces = tuple((rank * RECORD_BYTES, RECORD_BYTES) for rank in range(size))
        view.begin(_CPU, [(0, source)], Layout(((0, RECORD_BYTES),), pieces, Sizes.TOGETHER), [(0, whole)])
        view.wait(self._settings.start_timeout_s + time_for_all(size))
        view.fetch_places(_CPU, [(0, whole)])
        return [bytes(record.numpy()) for record in whole.chunk(size)]


def time_for_all(size: int) -> float:
    """Seconds that ``size`` ranks may take to connect."""
    return _CONNECT_S + 0.01 * size


def record_of(session: Session, settings: Settings, shares_memory: bool = False) -> bytes:
    """The record of this rank, of RECORD_BYTES, for the others. Raises ConfigurationError if it can't listen."""
    connector = session.peers.connector if session.peers is not None else None
    address = connector.address() if connector is not None else ""
    if len(address.encode()) > _ADDRESS_BYTES:
        raise ConfigurationError(
            f"DMLC_NODE_HOST={address[:40]}… is too long: at most {_ADDRESS_BYTES} bytes are possible"
        )
    return _RECORD.pack(session.machine_index, settings.num_servers, shares_memory, address.encode())


def machines_of(records: Sequence[bytes]) -> ConnectedMachines | None:
    """The machines of members that have told ``records``, by position. None if one of them can't be connected to."""
    on_machines: dict[int, list[int]] = {}
    has_spare, can_share_memory = False, True
    for position, record in enumerate(records):
        machine, spare, shares_memory, address = _RECORD.unpack(record)
        if not address.strip(b"\0"):
            return None
        on_machines.setdefault(machine, []).append(position)
        has_spare, can_share_memory = has_spare or bool(spare), can_share_memory and shares_memory
    return ConnectedMachines(tuple(tuple(some) for _, some in sorted(on_machines.items())), has_spare, can_share_memory)


def addresses_of(records: Sequence[bytes], ranks: Sequence[int], machine: int) -> dict[int, str]:
    """The addresses of those of ``ranks`` that are not on ``machine``."""
    told = ((rank, *_RECORD.unpack(record)) for rank, record in zip(ranks, records, strict=True))
    return {rank: address.rstrip(b"\0").decode() for rank, where, _, _, address in told if where != machine}


class NextSession:
    """``opener`` ends the present session, and opens the next one; a thread calls it. Any thread."""

    def __init__(self, opener: Callable[[], Session]) -> None:
        self._session: Future[Session] = Future()
        run = contextvars.copy_context().run  # with the caller's context of ranks
        threading.Thread(target=run, args=(self._run, opener), name="byteps-next-group", daemon=True).start()

    def _run(self, opener: Callable[[], Session]) -> None:
        try:
            self._session.set_result(opener())
        except BaseException as error:  # ``take`` raises it
            self._session.set_exception(error)

    @property
    def is_ready(self) -> bool:
        """``take`` returns or raises at once."""
        return self._session.done()

    def wait(self) -> None:
        """Until it is ready: settings.start_timeout_s bounds it."""
        self._session.exception()

    def take(self) -> Session:
        """Waits. Raises the errors of ``opener``."""
        return self._session.result()
