"""sparse_allreduce_async: sums of sparse tensors (COO) by name.

    allgather of indices ─┬ few in common: allgather of values ─► add
                          └ alltoall: to owners ─ add ─ allgather of sums

``collectives/row_owners.py`` says what is few. The call sends the indices; a thread of the pool does the rest, because
what a message holds depends on the one before. Any thread.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import torch

from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.completion import POOL
from byteps_py.torch.collectives.dtypes import check_indices
from byteps_py.torch.collectives.row_owners import (
    RowBytes,
    RowMeans,
    RowOwners,
    can_pay,
    check_numbers,
    indices_of,
    numbered,
    table_of,
)
from byteps_py.torch.operations.gathers import start_alltoall, start_gather
from byteps_py.torch.operations.handles import result_of
from byteps_py.torch.operations.process_sets import ProcessSet, group_of, members_of


class SparseAllreduce:
    """One sum."""

    def __init__(self, name: str, is_average: bool, process_set: ProcessSet) -> None:
        self._name = name
        self._group, self._members = group_of(process_set), members_of(process_set)
        self._how = RowMeans(len(self._members) if is_average else 0, "trunc")

    def start(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send the indices. Returns a function that waits for the result."""
        mine = tensor.detach().coalesce()
        place, table = contexts.current().session.machine_index, table_of(tensor.shape, tensor.dtype)
        facts = torch.tensor([[mine.indices().shape[1], place, table]], dtype=torch.int64, device=mine.device)
        handle = start_gather([mine.indices().t().contiguous(), facts], f"{self._name}.indices", self._group, True)
        result: Future[torch.Tensor] = Future()

        def carry_out() -> None:
            try:
                result.set_result(self._add(mine, *result_of(handle)))
            except BaseException as error:
                result.set_exception(error)

        current = contextvars.copy_context()
        POOL.run(lambda: current.run(carry_out))
        return result.result

    def _add(self, mine: torch.Tensor, every: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        """every: the indices of all ranks, [row, dimension]. facts: [rank, (rows, machine, what the table is)]."""
        values, shape = mine.values(), mine.shape
        table = tuple(shape[: mine.sparse_dim()])
        counts, machines, tables = facts.t().tolist()
        touched = []
        for rank, at in zip(self._members, every.split(counts), strict=True):
            check_indices(self._name, rank, at.t(), shape)
            touched.append(numbered(at.t(), table).cpu().numpy())
            check_numbers(self._name, rank, touched[-1], table)
        own = self._members.index(contexts.current().session.rank)
        owners = RowOwners(touched, machines, own)
        row = math.prod(values.shape[1:]) * values.itemsize
        nbytes = RowBytes(row, row)
        if len(set(tables)) == 1 and can_pay(counts, machines, nbytes) and owners.pays(nbytes):
            sums = self._sums_of_owners(owners, values, own)
        else:
            parts = self._gather(values, "values").split(counts)
            sums = self._how.combine(owners.places, parts, len(owners.rows))
        at = indices_of(torch.from_numpy(owners.rows), table).to(sums.device)
        return torch.sparse_coo_tensor(at, sums, shape, is_coalesced=True, check_invariants=False, device=sums.device)

    def _sums_of_owners(self, owners: RowOwners, values: torch.Tensor, own: int) -> torch.Tensor:
        members = range(len(self._members))
        given = [owners.given_to(p) for p in members]
        taken = [owners.taken_from(p) for p in members]
        order = torch.from_numpy(np.concatenate([rows for p, rows in enumerate(given) if p != own]))
        splits = [len(rows) if p != own else 0 for p, rows in enumerate(given)]
        name = f"{self._name}.pushed"
        handle = start_alltoall(values[order.to(values.device)], splits, name, self._group, background=False)
        received, _ = result_of(handle)
        parts = list(received.split([len(rows) if p != own else 0 for p, rows in enumerate(taken)]))
        parts[own] = values[torch.from_numpy(given[own]).to(values.device)]
        sums = self._gather(self._how.combine(taken, parts, owners.counts[own]), "sums")
        return sums[torch.from_numpy(owners.places_of_sums).to(sums.device)]

    def _gather(self, rows: torch.Tensor, what: str) -> torch.Tensor:
        found: torch.Tensor = result_of(start_gather([rows], f"{self._name}.{what}", self._group, background=False))
        return found
