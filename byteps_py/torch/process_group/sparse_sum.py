"""The sum of sparse tensors (COO): every member gathers the elements of all members and adds them itself.

The numbers of elements must be known before the elements can be sent, so the call first waits for a gather of numbers.
The gather of the elements is asynchronous. Must not know services. Any thread.
"""

from __future__ import annotations

import torch

from byteps_py.errors import MismatchError
from byteps_py.torch.collectives.dtypes import WIRE, check_count, check_indices
from byteps_py.torch.collectives.group_collectives import GroupCollectives, GroupTransfer
from byteps_py.torch.collectives.integer_averages import is_summed_wider, mean, summands
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.work import Work

_DTYPES = tuple(WIRE)
DTYPES = frozenset(_DTYPES)


def start_sparse_sum(
    collectives: GroupCollectives, members: Members, what: str, tensor: torch.Tensor, is_average: bool, timeout_s: float
) -> Work:
    """Begin to replace the sparse ``tensor`` by the sum or average over all members: coalesced, equal bits on all.

    Returns when all members have called it. Raises StallError, and MismatchError if members pass different shapes,
    numbers of sparse dimensions or dtypes.
    """
    mine = tensor.detach().coalesce()
    indices, values = mine.indices(), mine.values()
    own = [indices.shape[1], _DTYPES.index(values.dtype), indices.shape[0], *tensor.shape]
    headers = [torch.empty(len(own), dtype=torch.int64, device="cpu") for _ in range(members.count)]
    collectives.move(
        what, GroupTransfer.gather([torch.tensor(own, device="cpu")], [[header] for header in headers]), timeout_s
    ).wait()
    found = [header.tolist() for header in headers]
    _check(members, what, found)
    for rank, (count, *_) in zip(members.ranks, found, strict=True):
        check_count(what, rank, count, indices.shape[0], tensor.shape)
    pieces = [
        [indices.new_empty(indices.shape[0], count), values.new_empty(count, *values.shape[1:])] for count, *_ in found
    ]

    def add() -> None:
        for rank, piece in zip(members.ranks, pieces, strict=True):
            check_indices(what, rank, piece[0], tensor.shape)
        at = torch.cat([piece[0] for piece in pieces], 1)
        each = torch.cat([piece[1] for piece in pieces])
        is_wider = is_average and is_summed_wider(each.dtype)
        if is_wider:
            each = summands(each)
        shape = (*tensor.shape, 2) if each.dim() > values.dim() else tensor.shape
        total = torch.sparse_coo_tensor(at, each, shape, check_invariants=False, device=each.device).coalesce()
        if is_wider:
            averages = mean(total.values(), members.count, tensor.dtype, "floor")
            total = torch.sparse_coo_tensor(
                total.indices(),
                averages,
                tensor.shape,
                is_coalesced=True,
                check_invariants=False,
                device=averages.device,
            )
        with torch.no_grad():
            tensor.copy_(total / members.count if is_average and not is_wider else total)

    return collectives.move(what, GroupTransfer.gather([indices, values], pieces, [tensor], add), timeout_s)


def _check(members: Members, what: str, found: list[list[int]]) -> None:
    first = found[0]
    for rank, other in zip(members.ranks, found, strict=True):
        if other[1:] != first[1:]:
            raise MismatchError(
                f"{what}: rank {members.ranks[0]} gives {_described(first)}, rank {rank} {_described(other)}; give the "
                "same shape, sparse dimensions and dtype on every rank"
            )


def _described(header: list[int]) -> str:
    _, dtype, dimensions, *shape = header
    known = 0 <= dtype < len(_DTYPES)
    return (
        f"{_DTYPES[dtype] if known else '?'}{shape} with {dimensions} sparse dimension{'' if dimensions == 1 else 's'}"
    )
