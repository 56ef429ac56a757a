"""The optimizer of data="zero1": each rank has the states of its share of the parameters (Rajbhandari et al., 2020)."""

from __future__ import annotations

from torch import distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer


class ZeroOptimizer(ZeroRedundancyOptimizer):
    """torch's, with one gather after a step on backend "byteps", in which all owners send at a time. torch broadcasts
    parameter after parameter: with 80 of them on four machines, links were full for half of the time."""

    def _sync_params(self) -> None:
        group, parts = self.process_group, self._partition_parameters()  # type: ignore[attr-defined]
        owned = [[parameter.data for each in part for parameter in each["params"]] for part in parts]
        if dist.get_backend(group) != "byteps" or not all(owned):
            super()._sync_params()  # type: ignore[misc]
            return
        group.allgather_coalesced(owned, owned[dist.get_rank(group)]).wait()
