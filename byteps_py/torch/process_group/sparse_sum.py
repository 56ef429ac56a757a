"""all_reduce of a sparse tensor (COO): coalesced, equal bits on all members.

    headers ─┬ few elements: gather of indices and values ─► add
             └ gather of numbers ─┬ few in common: gather of values ─► add
                                  └ exchange: to owners ─ add ─ gather of sums

``collectives/row_owners.py`` says what is few, and why members choose alike. An element of a tensor whose dimensions
are all sparse is a row of one value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from byteps_py.errors import MismatchError
from byteps_py.torch.collectives.dtypes import WIRE, check_count, check_indices
from byteps_py.torch.collectives.group_collectives import GroupCollectives, GroupTransfer
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.row_owners import (
    Positions,
    RowBytes,
    RowMeans,
    RowOwners,
    can_pay,
    check_numbers,
    indices_of,
    merge,
    number_dtype,
    numbered,
)
from byteps_py.torch.collectives.work import Work

#: Dtypes of sparse tensors, in the order of their codes.
_DTYPES = tuple(WIRE)


class SparseSum:
    """One all-reduce of a sparse tensor among ``members``. ``what``: it, in errors."""

    def __init__(self, collectives: GroupCollectives, members: Members, what: str, timeout_s: float) -> None:
        self._collectives, self._members = collectives, members
        self._what, self._timeout_s = what, timeout_s

    def start(self, tensor: torch.Tensor, is_average: bool) -> Work:
        """Begin to replace ``tensor`` by the sum or average over all members.

        What a message holds depends on the one before, so the call waits for all messages but the last: it returns when
        all members have called it. Raises StallError, and MismatchError if members pass different shapes, numbers of
        sparse dimensions or dtypes.
        """
        mine = tensor.detach().coalesce()
        indices, values = mine.indices(), mine.values()
        counts, machines = self._exchange_headers(indices, values, tensor.shape)
        table = tuple(tensor.shape[: len(indices)])
        row = math.prod(values.shape[1:]) * values.itemsize
        nbytes = RowBytes(row, row)
        how = RowMeans(self._members.count if is_average else 0)
        every = [values.new_empty(count, *values.shape[1:]) for count in counts]

        def deliver(rows: Positions, sums: torch.Tensor) -> None:
            at = indices_of(torch.from_numpy(rows), table).to(sums.device)
            total = torch.sparse_coo_tensor(
                at, sums, tensor.shape, is_coalesced=True, check_invariants=False, device=sums.device
            )
            with torch.no_grad():
                tensor.copy_(total)

        if not can_pay(counts, machines, nbytes):
            at = [indices.new_empty(len(indices), count) for count in counts]

            def add() -> None:
                for rank, found in zip(self._members.ranks, at, strict=True):
                    check_indices(self._what, rank, found, tensor.shape)
                rows, places = merge([numbered(found, table).cpu().numpy() for found in at])
                deliver(rows, how.combine(places, every, len(rows)))

            pieces = [list(pair) for pair in zip(at, every, strict=True)]
            return self._gather([indices, values], pieces, [tensor], add)
        owners = RowOwners(self._numbers(indices, table, counts), machines, self._members.position)
        if not owners.pays(nbytes):
            return self._gather(
                [values],
                [[rows] for rows in every],
                [tensor],
                lambda: deliver(owners.rows, how.combine(owners.places, every, len(owners.rows))),
            )
        own = self._sums_of_own_rows(owners, values, how)
        sums = [values.new_empty(count, *values.shape[1:]) for count in owners.counts]
        order = torch.from_numpy(owners.places_of_sums).to(values.device)
        return self._gather(
            [own], [[rows] for rows in sums], [tensor], lambda: deliver(owners.rows, torch.cat(sums)[order])
        )

    def _exchange_headers(
        self, indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """(the number of elements of each member, its machine)."""
        members = self._members
        own = [
            indices.shape[1], members.session.machine_index, _DTYPES.index(values.dtype), indices.shape[0], *shape
        ]  # fmt: skip
        headers = [torch.empty(len(own), dtype=torch.int64, device="cpu") for _ in range(members.count)]
        self._gather([torch.tensor(own, device="cpu")], [[header] for header in headers]).wait()
        found = [header.tolist() for header in headers]
        for rank, other in zip(members.ranks, found, strict=True):
            if other[2:] != found[0][2:]:
                raise MismatchError(
                    f"{self._what}: rank {members.ranks[0]} gives {_described(found[0])}, rank {rank} "
                    f"{_described(other)}; give the same shape, sparse dimensions and dtype on every rank"
                )
        for rank, (count, *_) in zip(members.ranks, found, strict=True):
            check_count(self._what, rank, count, indices.shape[0], shape)
        return [header[0] for header in found], [header[1] for header in found]

    def _numbers(self, indices: torch.Tensor, table: Sequence[int], counts: Sequence[int]) -> list[Positions]:
        """The numbers of all members' rows."""
        mine = numbered(indices, table).to(number_dtype(table))
        every = [mine.new_empty(count) for count in counts]
        self._gather([mine], [[numbers] for numbers in every]).wait()
        touched = [numbers.cpu().numpy() for numbers in every]
        for rank, numbers in zip(self._members.ranks, touched, strict=True):
            check_numbers(self._what, rank, numbers, table)
        return touched

    def _sums_of_own_rows(self, owners: RowOwners, values: torch.Tensor, how: RowMeans) -> torch.Tensor:
        me, positions = self._members.position, range(self._members.count)
        taken = [owners.taken_from(p) for p in positions]
        given = [values[torch.from_numpy(owners.given_to(p)).to(values.device)] for p in positions]
        parts = [given[p] if p == me else values.new_empty(len(taken[p]), *values.shape[1:]) for p in positions]
        nothing = values[:0]
        transfer = GroupTransfer.exchange(
            [[nothing if p == me else given[p]] for p in positions],
            [[values.new_empty(nothing.shape) if p == me else parts[p]] for p in positions],
        )
        self._collectives.move(self._what, transfer, self._timeout_s).wait()
        return how.combine(taken, parts, owners.counts[me])

    def _gather(
        self,
        tensors: list[torch.Tensor],
        receives: list[list[torch.Tensor]],
        outputs: list[torch.Tensor] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        return self._collectives.move(
            self._what, GroupTransfer.gather(tensors, receives, outputs, finish), self._timeout_s
        )


def _described(header: list[int]) -> str:
    _, _, dtype, dimensions, *shape = header
    known = 0 <= dtype < len(_DTYPES)
    return (
        f"{_DTYPES[dtype] if known else '?'}{shape} with {dimensions} sparse dimension{'' if dimensions == 1 else 's'}"
    )
