"""torchft's Manager over byteps_py: a process group that torchft may configure anew, for every quorum.

    from byteps_py.torchft import ProcessGroupBytePS
    manager = Manager(pg=ProcessGroupBytePS(timeout=timedelta(seconds=30)), …)

This module needs torchft (``pip install torchft``). The thread that computes torchft's quorum configures; any thread
may call collectives, as of every group.
"""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import Any

from torchft.process_group import ProcessGroupWrapper

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, UnsupportedError
from byteps_py.system.machine import machine_id
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.torch_rendezvous import count_rounds
from byteps_py.torch.process_group.byteps_process_group import count_worlds, create


class ProcessGroupBytePS(ProcessGroupWrapper):
    """One rank of each replica, all on one machine. A new quorum begins a new job of byteps_py, whose ranks find each
    other through torchft's store. ``timeout``: of operations, and of the store.

    ``configure`` raises UnsupportedError for replicas on several machines, and RendezvousError. torchft logs both, and
    goes on with the next quorum.
    """

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "torchft-byteps"

    def abort(self, errored: bool = True) -> None:
        """Leave the job: operations that wait fail, here, and with the others, at once."""
        super().abort(errored)
        with contextlib.suppress(BytePSError):  # of operations that it has ended
            contexts.current().close(is_finished=False)

    def shutdown(self) -> None:
        """The training is over."""
        super().shutdown()
        contexts.current().close()

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        # Processes of different ages: one has seen more quorums than another.
        own = [machine_id(Settings.from_env()), count_worlds(), count_rounds()]
        store.set(f"byteps/{rank}", json.dumps(own))
        machines, worlds, rounds = zip(
            *(json.loads(store.get(f"byteps/{other}")) for other in range(world_size)), strict=True
        )
        count_worlds(at_least=max(worlds))
        count_rounds(at_least=max(rounds))
        if len(set(machines)) > 1:
            raise UnsupportedError(
                f"torchft's replicas are on {len(set(machines))} machines, and have no address in common at which a "
                "scheduler of byteps_py could listen: use ProcessGroupGloo there, or byteps_py's "
                "DistributedOptimizer, which survives losses by itself (docs/howto/never-lose-a-step.md)"
            )
        return create(
            SimpleNamespace(
                store=store,
                group_rank=rank,
                group_size=world_size,
                timeout=self._timeout,
                group_id="torchft",
                global_ranks_in_group=(),
            )
        )
