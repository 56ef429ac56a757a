"""RDMA by NIXL, a library that moves bytes by UCX: `pip install '.[rdma]'`.

UCX takes any transport that there is, TCP too, and says nothing. So it is told which ones it may take: those of RDMA
cards, unless BYTEPS_RDMA_TRANSPORTS names others. Without one of them no agent comes about.

One thread at a time calls an agent: a RdmaLane sees to that.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import uuid
from collections.abc import Iterator
from typing import Any

from byteps_py.config.settings import Settings
from byteps_py.dataplane.rdma_lane import Poster, RdmaLane
from byteps_py.errors import ConfigurationError, PeerLostError
from byteps_py.system.rdma_devices import REMEDY, check_rdma, devices, library

#: UCX's name for all transports of RDMA cards.
_HARDWARE = "ib"


def open_rdma_lane(settings: Settings, loop: Poster) -> RdmaLane | None:
    """The lane of this process; None: tensors travel over TCP. Raises ConfigurationError."""
    return new_rdma_lane(settings, loop) if settings.rdma else None


def new_rdma_lane(settings: Settings, loop: Poster) -> RdmaLane:
    """The lane of this process, which has RDMA switched on. Raises ConfigurationError."""
    check_rdma(settings)
    return RdmaLane(NixlAgent(settings.rdma_transports), loop, settings.patience_s)


def try_rdma(settings: Settings) -> None:
    """Raises ConfigurationError if this machine can't do what ``settings`` say about RDMA: before a group needs it."""
    if settings.rdma:
        check_rdma(settings)
        NixlAgent(settings.rdma_transports).close()


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """UCX reads its environment when an agent is made."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class NixlAgent:
    """See RdmaAgent. ``transports``: names of UCX's; empty: those of RDMA cards."""

    def __init__(self, transports: str) -> None:
        self.name = f"byteps-{uuid.uuid4().hex}"
        self.is_hardware = not transports
        level = {"NIXL_LOG_LEVEL": os.environ.get("NIXL_LOG_LEVEL", "ERROR")}
        if not self.is_hardware:  # a process that has ended is an error to UCX over TCP, also at the end of a job
            level["UCX_LOG_LEVEL"] = os.environ.get("UCX_LOG_LEVEL", "FATAL")
        with _environment(UCX_TLS=transports or _HARDWARE, **level):
            nixl = importlib.import_module(library())
            bindings = importlib.import_module(f"{nixl.__name__}._bindings")
            kinds = [each for each in vars(bindings).values() if isinstance(each, type)]
            self._errors = tuple(kind for kind in kinds if issubclass(kind, Exception))
            try:
                # No thread of its own: it would poll all the time.
                self._agent: Any = nixl.nixl_agent(self.name, nixl.nixl_agent_config(enable_prog_thread=False))
            except self._errors as error:
                names = transports or "the transports of RDMA cards (InfiniBand, RoCE)"
                raise ConfigurationError(
                    f"DMLC_ENABLE_RDMA is set, and UCX can use none of {names} on this machine ({error}): see its "
                    f"lines in the log; check that a port of {', '.join(devices()) or 'an RDMA card'} is active "
                    f"(ibv_devinfo) and that UCX_NET_DEVICES, if it is set, names it, {REMEDY}"
                ) from error

    def register(self, address: int, nbytes: int) -> None:
        try:
            self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")
        except self._errors as error:
            raise ConfigurationError(
                f"RDMA: {nbytes >> 20} MB of memory can't be registered ({error}): allow locked memory without a limit "
                f"(ulimit -l unlimited; in containers --ulimit memlock=-1), {REMEDY}"
            ) from error

    def describe(self) -> bytes:
        description: bytes = self._agent.get_agent_metadata()
        return description

    def meet(self, description: bytes) -> str:
        try:
            name = self._agent.add_remote_agent(description)
        except self._errors as error:
            raise PeerLostError(
                f"the other end can't be reached by RDMA ({error}): are both on one network?"
            ) from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def part(self, name: str) -> None:
        with contextlib.suppress(*self._errors):  # it is forgotten already, when it was seen to end
            self._agent.remove_remote_agent(name)

    def read(self, name: str, there: int, here: int, nbytes: int) -> object:
        agent = self._agent
        try:
            mine = agent.get_xfer_descs([(here, nbytes, 0)], "DRAM")
            theirs = agent.get_xfer_descs([(there, nbytes, 0)], "DRAM")
            read: object = agent.initialize_xfer("READ", mine, theirs, name)
            self._ask(agent.transfer(read))
        except self._errors as error:
            raise _lost(error) from error
        return read

    def is_done(self, read: object) -> bool:
        try:
            return self._ask(self._agent.check_xfer_state(read))
        except self._errors as error:
            raise _lost(error) from error

    @staticmethod
    def _ask(state: str) -> bool:
        if state == "ERR":
            raise PeerLostError("a read by RDMA has failed")
        return state == "DONE"

    def release(self, read: object) -> None:
        with contextlib.suppress(*self._errors):  # it goes on: see RdmaLane._part
            self._agent.release_xfer_handle(read)

    def advance(self) -> None:
        with contextlib.suppress(*self._errors):  # about an agent that has ended, which its connection says, too
            self._agent.get_new_notifs()

    def close(self) -> None:
        self._agent = None


def _lost(error: Exception) -> PeerLostError:
    return PeerLostError(f"a read by RDMA has failed ({error}): the other end is gone, or the network in between")
