"""A trainer's end of reading shadowed states. A subprocess, which may use gRPC, makes the calls.

One thread at a time. The subprocess ends with ``close``, and if the trainer ends: then its standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from types import TracebackType

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, CommunicationError, PeerLostError, ProtocolError, UsageError, from_name
from byteps_py.shadow.frames import FrameKind, read_frame, write_frame
from byteps_py.shadow.restorable import RestorablePartition, RestorableRecord, ServerDescription
from byteps_py.wire.data_link import ShadowDescription

_CLOSE_S = 5.0
#: The subprocess has its own deadlines; this is for one that is stuck, or has much to load.
_MORE_S = 20.0
#: The bytes of an attachment that one call reads: each call has its own deadline.
_PIECE_BYTES = 16 << 20


class ShadowReader:
    """Reads the states that the servers of the job of ``settings`` hold.

    Args:
        settings: say where the job's scheduler is.
        timeout_s: the deadline of each call.

    ``close``, or the end of a ``with`` block, ends its subprocess.
    """

    def __init__(self, settings: Settings, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._settings = {
            "scheduler_host": settings.scheduler_host,
            "scheduler_port": settings.scheduler_port,
            "job_id": settings.job,
            "secret": settings.secret,
            "local_secret": settings.local_secret,
            "heartbeat_interval_s": settings.heartbeat_interval_s,
            "heartbeat_timeout_s": settings.heartbeat_timeout_s,
        }

    def __enter__(self) -> ShadowReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def describe(self, hold_s: float = 0.0) -> list[ServerDescription]:
        """The states that each server holds; servers that give no answer are listed with their error. For ``hold_s``
        seconds (at most 60) servers apply no steps, so that the described states can be read while training goes on.

        Empty without a scheduler: then there are no servers on other machines. Raises RendezvousError, StallError or
        CommunicationError if the scheduler can't be asked.
        """
        if not self._settings["scheduler_host"]:
            return []
        found: list[ServerDescription] = []
        address, problem = "", ""
        self._send(FrameKind.DESCRIBE, {"hold_s": hold_s, "timeout_s": self._timeout_s})
        while (frame := self._receive())[0] is not FrameKind.END:
            kind, payload = frame
            if kind is FrameKind.SERVER:
                address, problem = json.loads(payload)
            elif kind is FrameKind.DESCRIPTION:
                found.append(ServerDescription(address, ShadowDescription.unpack(payload), problem))
            else:
                raise self._broken(f"{kind.name} in the answer to DESCRIBE")
        return found

    def read_into(self, partition: RestorablePartition, state: int, elements: range, view: memoryview) -> None:
        """Read a state's elements into ``view``.

        partition: of a Restorable. state: 0 is the master, the others are moments. elements: of the tensor, among
        ``partition.elements``. view: writable bytes, ``partition.kind.state_itemsize`` for each element.

        Raises UsageError for other elements or sizes, CommunicationError if the server can't deliver them any more.
        """
        size = partition.kind.state_itemsize
        is_inside = partition.elements.start <= elements.start <= elements.stop <= partition.elements.stop
        if not is_inside or elements.step != 1 or not 0 <= state < partition.kind.states:
            raise UsageError(
                f"{elements} of state {state} are not among {partition.elements} of {partition.kind.states} states"
            )
        target = view.cast("B")
        if len(target) != len(elements) * size or target.readonly:
            raise UsageError(f"{len(elements)} elements take {len(elements) * size} writable bytes, not {len(target)}")
        request = {
            "run": partition.run, "key": partition.key, "index": partition.index, "step": partition.step,
            "state": state, "start": elements.start - partition.first, "stop": elements.stop - partition.first,
        }  # fmt: skip
        self._send(FrameKind.READ, {"server": partition.server, "timeout_s": self._timeout_s, "request": request})
        self._take_data(partition.server, target, "READ")

    def read_attached(self, record: RestorableRecord) -> bytearray:
        """The bytes that a rank has attached to its record. Raises CommunicationError if the server can't deliver it
        any more."""
        found = bytearray(record.attached_bytes)
        for start in range(0, len(found), _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, len(found))
            request = {"run": record.run, "step": record.step, "rank": record.rank, "start": start, "stop": stop}
            asked = {"server": record.server, "timeout_s": self._timeout_s, "request": request}
            self._send(FrameKind.READ_ATTACHED, asked)
            self._take_data(record.server, memoryview(found)[start:stop], "READ_ATTACHED")
        return found

    def close(self) -> None:
        """End the subprocess."""
        process, self._process = self._process, None
        if process is None or process.stdin is None or process.stdout is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    # ---- frames ------------------------------------------------------------------------------------------------

    def _take_data(self, server: str, target: memoryview, what: str) -> None:
        at = 0
        while (frame := self._receive())[0] is not FrameKind.END:
            kind, data = frame
            if kind is not FrameKind.DATA or at + len(data) > len(target):
                raise self._broken(f"{kind.name} of {len(data)} bytes in the answer to {what}")
            target[at : at + len(data)] = data
            at += len(data)
        if at != len(target):
            raise CommunicationError(f"the server at {server} gave {at} bytes of {len(target)}")

    def _send(self, kind: FrameKind, said: object) -> None:
        if self._process is None:
            command = [sys.executable, "-P", "-m", "byteps_py.shadow"]
            environ = {"GRPC_VERBOSITY": "ERROR", **os.environ}  # a server closes connections that are idle
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environ
            )
            self._write(FrameKind.SETTINGS, self._settings)
        self._write(kind, said)
        self._until_s = time.monotonic() + self._timeout_s + _MORE_S

    def _write(self, kind: FrameKind, said: object) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise self._broken("it has no standard input")
        write_frame(process.stdin.fileno(), kind, json.dumps(said).encode())

    def _receive(self) -> tuple[FrameKind, bytes]:
        """Raises the error that the subprocess reports. After any other error it is ended, and the next call starts a
        new one."""
        process = self._process
        if process is None or process.stdout is None:
            raise self._broken("it has no standard output")
        try:
            kind, payload = read_frame(process.stdout.fileno(), self._until_s)
        except BytePSError as error:
            process.kill()
            self.close()
            if isinstance(error, PeerLostError):
                raise PeerLostError(f"{error} (exit status {process.returncode})") from error
            raise
        if kind is FrameKind.ERROR:
            name, _, text = payload.decode().partition("\n")
            raise from_name(name, text)
        return kind, payload

    def _broken(self, what: str) -> ProtocolError:
        if self._process is not None:
            self._process.kill()
        self.close()
        return ProtocolError(f"the process that reads shadowed states: {what}")
