"""Connects the members of a group that are on several machines: they exchange addresses through the communication
service, and connect in pairs (byteps_py/session/peers/peer_connector.py). All members call it when they create the
group.
"""

from __future__ import annotations

import dataclasses
import struct
import time
from typing import NamedTuple

import torch

from byteps_py.errors import ConfigurationError
from byteps_py.tensors import Op
from byteps_py.torch.engine.completion import Completer
from byteps_py.torch.engine.group_work import GroupContext
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.service_gathers import ServiceGathers
from byteps_py.torch.engine.work import Call

#: The index of the machine; the number of spare machines; the address, empty if the rank can't be connected to.
_RECORD = struct.Struct("<II504s")
_ADDRESS_BYTES = 500


class ConnectedMachines(NamedTuple):
    """The machines of a group whose members are connected. ``positions``: of the members on each machine.
    ``has_spare``: other machines sum, too."""

    positions: tuple[tuple[int, ...], ...]
    has_spare: bool

    @property
    def have_one_each(self) -> bool:
        """True if no two members are on the same machine."""
        return all(len(some) == 1 for some in self.positions)


def connect(members: Members, group_context: GroupContext, completer: Completer) -> ConnectedMachines | None:
    """The machines of the group, once all members of other machines are connected to this one. None if the settings of
    a member do not allow that. Raises RendezvousError, StallError and what ends the session."""
    session, count = members.session, members.count
    connector = session.peers.connector if session.peers is not None else None
    address = connector.address() if connector is not None else ""
    if len(address.encode()) > _ADDRESS_BYTES:
        raise ConfigurationError(
            f"DMLC_NODE_HOST={address[:40]}… is too long: at most {_ADDRESS_BYTES} bytes are possible"
        )
    spare = members.context.settings.num_servers
    # A group whose operations may take a moment only still has time to be made.
    limit_s = max(group_context.timeout_s, members.context.settings.start_timeout_s)
    deadline = time.monotonic() + limit_s
    mine = torch.frombuffer(bytearray(_RECORD.pack(session.machine_index, spare, address.encode())), dtype=torch.uint8)
    whole = torch.empty(count * _RECORD.size, dtype=torch.uint8)
    gathers = ServiceGathers(
        dataclasses.replace(members, prefix=f"{members.prefix}.addresses"), group_context, completer
    )
    gathers.even(Op.GATHER, Call("exchange of addresses", [whole], limit_s), mine, whole).wait()
    records = [_RECORD.unpack(bytes(record.numpy())) for record in whole.chunk(count)]
    if connector is None or not all(place.strip(b"\0") for *_, place in records):
        return None
    on_machines: dict[int, list[int]] = {}
    for position, (machine, *_) in enumerate(records):
        on_machines.setdefault(machine, []).append(position)
    others = {
        members.ranks[position]: place.rstrip(b"\0").decode()
        for position, (machine, _, place) in enumerate(records)
        if machine != session.machine_index
    }
    connector.connect(others, max(0.0, deadline - time.monotonic()))
    positions = tuple(tuple(some) for _, some in sorted(on_machines.items()))
    return ConnectedMachines(positions, any(spare for _, spare, _ in records))
