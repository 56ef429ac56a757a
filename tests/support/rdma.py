"""A stand-in for a library of RDMA: all agents are in one process, and copy from each other's memory."""

from __future__ import annotations

import ctypes
import itertools
import json
from dataclasses import dataclass

from byteps_py.errors import PeerLostError

_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class _Read:
    whose: str
    there: int
    here: int
    nbytes: int
    polls_left: int
    is_released: bool = False


class StandInAgent:
    """``polls``: how often a read is asked for until it is done. ``is_alone``: it
    reaches no other agent. ``is_stuck``: reads never end. ``fails``: they fail.
    ``lies``: of so many reads it says that they are done, and no byte has come.
    ``breaks``: what it raises that no agent should."""

    is_hardware = False

    def __init__(self, polls: int = 2) -> None:
        self.name = f"stand-in-{next(_numbers)}"
        self.polls = polls
        self.is_stuck = self.fails = self.is_closed = self.is_alone = False
        self.lies = 0
        self.breaks: Exception | None = None
        self.regions: list[tuple[int, int]] = []
        self.known: dict[str, list[tuple[int, int]]] = {}
        self.reads: list[_Read] = []
        self.advanced = 0
        _agents[self.name] = self

    def register(self, address: int, nbytes: int) -> None:
        assert (address, nbytes) not in self.regions, "registered twice"
        self.regions.append((address, nbytes))

    def describe(self) -> bytes:
        return json.dumps([self.name, self.regions]).encode()

    def meet(self, description: bytes) -> str:
        try:
            name, regions = json.loads(description)
        except ValueError as error:
            raise PeerLostError(f"no description of an agent: {error}") from None
        if self.is_alone:
            raise PeerLostError("there is no way to it")
        self.known[name] = [(address, nbytes) for address, nbytes in regions]
        return str(name)

    def part(self, name: str) -> None:
        self.known.pop(name, None)

    def read(self, name: str, there: int, here: int, nbytes: int) -> object:
        allowed = self.known.get(name, [])
        if not any(start <= there and there + nbytes <= start + size for start, size in allowed):
            raise PeerLostError(f"{nbytes} bytes at {there:#x} are not registered")
        assert any(start <= here and here + nbytes <= start + size for start, size in self.regions)
        one = _Read(name, there, here, nbytes, self.polls)
        self.reads.append(one)
        return one

    def is_done(self, read: object) -> bool:
        assert isinstance(read, _Read)
        assert not read.is_released
        if self.breaks is not None:
            raise self.breaks
        if self.fails or _agents[read.whose].is_closed:
            raise PeerLostError("the stand-in has failed")
        if self.is_stuck:
            return False
        if self.lies:
            self.lies -= 1
            return True
        read.polls_left -= 1
        if read.polls_left <= 0:
            ctypes.memmove(read.here, read.there, read.nbytes)
        return read.polls_left <= 0

    def release(self, read: object) -> None:
        assert isinstance(read, _Read)
        read.is_released = True
        self.reads.remove(read)

    def advance(self) -> None:
        self.advanced += 1

    def close(self) -> None:
        self.is_closed = True


_agents: dict[str, StandInAgent] = {}
