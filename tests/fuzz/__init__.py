"""Seeded fuzzing of everything that reads bytes or words which somebody else wrote.

``python -m tests.fuzz --inputs 10000000`` takes minutes; test_fuzz.py runs a few thousand inputs of each target.
The same seed gives the same inputs. A target is a class: ``seeds`` are well-formed inputs, ``feed`` takes one input and
raises only what no input may cause.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # `support`, also where nobody has said where it is

from .base import Target
from .beside import ServerBeside
from .calling import DialerHears
from .collectives import Calls, Collectives, RowMessages
from .control import Control, JournalFile, Streams
from .files import GpuList, ModelFile, Objects, Snapshot
from .machines import Machines
from .mutator import Mutator
from .orders import Orders
from .peers import PeersHear
from .ranks import Ranks
from .requests import Nearby, Requests
from .server_orders import ServerOrders
from .services import ServiceHears
from .sessions import Sessions
from .targets import Environment, Handshake, Listener, LocalProtocol, Seals, ServerRounds, ShadowPayloads, WireHeader

TARGETS: dict[str, type[Target]] = {
    kind.__name__: kind
    for kind in (
        WireHeader,
        Seals,
        Handshake,
        Listener,
        ServerRounds,
        Requests,
        LocalProtocol,
        ShadowPayloads,
        Nearby,
        PeersHear,
        Machines,
        Environment,
        Control,
        Streams,
        JournalFile,
        DialerHears,
        ServerBeside,
        Ranks,
        Orders,
        ServerOrders,
        ServiceHears,
        Sessions,
        ModelFile,
        GpuList,
        Snapshot,
        Objects,
        Collectives,
        RowMessages,
        Calls,
    )
}


def fuzz(kind: type[Target], inputs: int, seed: int) -> Target:
    """Feed so many inputs, fewer if each costs much. An exception says which one broke it, and how to see it again."""
    target = kind()
    mutator = Mutator(target.seeds, seed)
    try:
        for number in range(inputs // kind.cost):
            data = mutator.next()
            try:
                target.feed(data)
            except Exception as error:
                raise AssertionError(f"{kind.__name__}, seed {seed}, input {number}: {data.hex()}") from error
        target.end()
    finally:
        target.close()
    return target
