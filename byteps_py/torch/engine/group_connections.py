"""Connects the members of a process group that are on several machines: they exchange addresses through the
communication service, and connect in pairs (byteps_py/session/peers/peer_connector.py). All members call it when they
create the group. job_connections.py does the same for all ranks of a job.
"""

from __future__ import annotations

import dataclasses
import time

import torch

from byteps_py.tensors import Op
from byteps_py.torch.engine.completion import Completer
from byteps_py.torch.engine.group_work import GroupContext
from byteps_py.torch.engine.machine_addresses import (
    RECORD_BYTES,
    ConnectedMachines,
    addresses_of,
    machines_of,
    record_of,
)
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.ring import ring_sum
from byteps_py.torch.engine.service_gathers import ServiceGathers
from byteps_py.torch.engine.work import Call


def connect(members: Members, group_context: GroupContext, completer: Completer) -> ConnectedMachines | None:
    """The machines of the group, once all members of other machines are connected to this one. None if the settings of
    a member do not allow that. Raises RendezvousError, StallError and what ends the session."""
    session, settings, count = members.session, members.context.settings, members.count
    # A group whose operations may take a moment only still has time to be made.
    limit_s = max(group_context.timeout_s, settings.start_timeout_s)
    deadline = time.monotonic() + limit_s
    near = range(session.rank - session.local_rank, session.rank - session.local_rank + session.local_size)
    has_ring = sum(rank in near for rank in members.ranks) > 1 and ring_sum.is_able()
    mine = torch.frombuffer(bytearray(record_of(session, settings, has_ring)), dtype=torch.uint8)
    whole = torch.empty(count * RECORD_BYTES, dtype=torch.uint8, device="cpu")
    gathers = ServiceGathers(
        dataclasses.replace(members, prefix=f"{members.prefix}.addresses"), group_context, completer
    )
    gathers.even(Op.GATHER, Call("exchange of addresses", [whole], limit_s), mine, whole).wait()
    records = [bytes(record.numpy()) for record in whole.chunk(count)]
    machines = machines_of(records)
    if machines is not None and session.peers is not None and session.peers.connector is not None:
        addresses = addresses_of(records, members.ranks, session.machine_index)
        session.peers.connector.connect(addresses, max(0.0, deadline - time.monotonic()))
    return machines
