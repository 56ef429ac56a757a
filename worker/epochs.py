"""From one epoch's servers to the next one's, in the middle of rounds. Owned by the loop's thread.

The scheduler's word comes to every machine at the same place in the order of verdicts, so all have the same table
after it. What was given to a server that has lost a partition, and is not answered, is given to the one that has it
now, RESENT: that one asks the other machines for their parts if they have the result already. So machines need not go
over at the same moment, and none waits for another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from byteps_py.log import logger
from byteps_py.proto import control_pb2 as pb
from byteps_py.wording import count_text
from byteps_py.worker.credit import PushQueue
from byteps_py.worker.executor import Executor
from byteps_py.worker.network import Network
from byteps_py.worker.placing import Placing
from byteps_py.worker.tensor import Part
from byteps_py.worker.topology import Topology


class Epochs:
    """``topology``: of the first epoch."""

    def __init__(
        self,
        topology: Topology,
        placing: Placing,
        network: Network | None,
        executor: Executor,
        queue: PushQueue[Part],
        send: Callable[[pb.MemberMessage], None],
    ) -> None:
        self._topology = topology
        self._placing = placing
        self._network = network
        self._executor = executor
        self._queue = queue
        self._send = send

    def change(self, membership: pb.Membership) -> None:
        """Other servers, the same workers. Raises ProtocolError for servers that can't be."""
        if membership.epoch <= self._topology.epoch or self._network is None:
            return
        topology = self._topology = dataclasses.replace(
            self._topology, epoch=membership.epoch, servers=tuple(membership.servers)
        )
        topology.check()
        self._placing.change(topology)
        self._network.change(topology)
        self._queue.set_weights(topology.weights, topology.head_starts(self._queue.credit_bytes))
        moved = self._executor.move(self._placing.server_of)
        self._send(pb.MemberMessage(applied=pb.Applied(epoch=membership.epoch, moved=moved)))
        logger.warning(
            "epoch %d: moved %s to %s: %s",
            membership.epoch, count_text(moved, "partition"), count_text(len(topology.servers), "summation service"),
            membership.reason,
        )  # fmt: skip
