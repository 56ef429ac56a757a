"""The machines and addresses that ranks exchange before they connect. Any thread."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from byteps_py.errors import ConfigurationError
from byteps_py.session import Session
from byteps_py.settings import Settings

#: The index of the machine; the number of spare machines; whether the instructions for sums in shared memory are
#: compiled; the address,
#: empty if the rank can't be connected to.
_RECORD = struct.Struct("<II?503s")
RECORD_BYTES = _RECORD.size
_ADDRESS_BYTES = 500


class ConnectedMachines(NamedTuple):
    """The machines of a group whose members are connected. ``positions``: of the members on each machine.
    ``has_spare``: other machines sum, too. ``can_share_memory``: all members can add in shared memory."""

    positions: tuple[tuple[int, ...], ...]
    has_spare: bool
    can_share_memory: bool

    @property
    def are_even(self) -> bool:
        """True if as many members are on each machine."""
        return len(set(map(len, self.positions))) == 1

    @property
    def can_share(self) -> bool:
        """True if the members add large sums in shares."""
        if self.has_spare or not self.are_even:
            return False
        return self.can_share_memory or len(self.positions[0]) == 1

    def of(self, ranks: Sequence[int]) -> ConnectedMachines:
        """The machines of some ``ranks``, and their positions among these. Positions of this object are ranks."""
        found = (tuple(ranks.index(rank) for rank in some if rank in ranks) for some in self.positions)
        return self._replace(positions=tuple(some for some in found if some))


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
