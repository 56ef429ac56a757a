"""Collectives that go through the summation servers, if there are any: reductions, broadcast, barrier. Any thread.

all_reduce of a sparse tensor (COO) gives a coalesced one, with equal bits on all members:

    headers ─┬ few elements: gather of indices and values ─► add
             └ gather of numbers ─┬ few in common: gather of values ─► add
                                  └ exchange: to owners ─ add ─ gather of sums

``collectives/row_owners.py`` says what is few, and why members choose alike. An element of a tensor whose dimensions
are all sparse is a row of one value.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from byteps_py.errors import MismatchError, UsageError
from byteps_py.tensors import Op
from byteps_py.torch.collectives.dtypes import WIRE, check_count, check_indices
from byteps_py.torch.collectives.group_collectives import GroupCollectives, GroupTransfer, Reduction
from byteps_py.torch.collectives.group_work import CombinedWork
from byteps_py.torch.collectives.integer_averages import is_summed_wider, mean, summands
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
from byteps_py.torch.collectives.tensor_bytes import check_writable
from byteps_py.torch.collectives.work import Call, Work, timeout_s_of
from byteps_py.torch.compression import Compressor, codec_for
from byteps_py.torch.process_group.group_base import GroupBase, Tensors, assign, dense_tensors, only, reduction_of

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


SUM = dist.ReduceOp.SUM
_CODED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class ReductionCollectives(GroupBase):
    """The collectives that reduce. See torch.distributed.ProcessGroup for the methods."""

    def allreduce(self, tensors: Tensors, opts: Any = None, op: Any = None) -> Work:
        """Reduce a tensor over all members, in place. A sparse tensor (COO) takes SUM and AVG, and its call waits until
        all members have called."""
        given = tensors if isinstance(tensors, torch.Tensor) else only(tensors, "allreduce")
        if given.layout is torch.sparse_coo:
            return self._add_sparse(given, opts, op)
        tensor = only(dense_tensors(tensors), "allreduce")
        work = self._reduce("all_reduce", [tensor], [tensor], opts, op)
        if tensor.numel() == 1:
            self._kept_works.append(work)
        return work

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce several tensors in place. Those of one dtype travel together."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for tensor in dense_tensors(tensors):
            by_dtype[tensor.dtype].append(tensor)
        works = [self._reduce("all_reduce_coalesced", group, group, opts) for group in by_dtype.values()]
        return self._combine("all_reduce_coalesced", works, dense_tensors(tensors), opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce a tensor to the root. Costs as much as an all-reduce, of which only the root copies the result."""
        tensor = only(dense_tensors(tensors), "reduce")
        root = opts.rootRank if opts is not None else 0
        self._members.check_root(root)
        outputs = [tensor] if root == self.rank() else []
        return self._reduce("reduce", [tensor], outputs, opts)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Reduce a list of tensors; each member gets the result at its position."""
        output = only(dense_tensors(output_tensors), "reduce_scatter")
        inputs = dense_tensors(only(input_tensors, "reduce_scatter"))
        if len(inputs) != self.size() or inputs[self.rank()].numel() != output.numel():
            raise UsageError(
                f"reduce_scatter: expected {self.size()} tensors, with {output.numel()} elements at position "
                f"{self.rank()}, got {[list(tensor.shape) for tensor in inputs]}"
            )
        if len({tensor.numel() for tensor in inputs}) > 1:
            return self._reduce_uneven(output, inputs, opts)
        return self._reduce_scatter("reduce_scatter", inputs, output, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Reduce a tensor; each member gets an equal share of its elements."""
        dense_tensors([output, input])
        if input.numel() != output.numel() * self.size():
            raise UsageError(
                f"reduce_scatter_tensor: an input of {input.numel()} elements for {self.size()} ranks and an output of "
                f"{output.numel()}; the input must be {self.size()} times as large"
            )
        return self._reduce_scatter("reduce_scatter_tensor", [input], output, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Reduce several tensors; each member gets an equal share of the elements of each."""
        pairs = zip(dense_tensors(outputs), dense_tensors(inputs), strict=True)
        works = [self._reduce_scatter_base(output, input, opts) for output, input in pairs]
        return self._combine("reduce_scatter_tensor_coalesced", works, dense_tensors(outputs), opts)

    def broadcast(self, tensors: Tensors, opts: Any = None, root: int | None = None) -> Work:
        """Copy the root's tensor to all members."""
        tensor = only(dense_tensors(tensors), "broadcast")
        source = root if root is not None else opts if isinstance(opts, int) else opts.rootRank if opts else 0
        return self._record(self._collectives.broadcast(Call("broadcast", [tensor], self._timeout_s(opts)), source))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Done when every member has called it."""
        limit_s = timeout_s_of(timeout) or self._timeout_s(opts)
        return self._record(self._collectives.barrier(limit_s))

    def _add_sparse(self, tensor: torch.Tensor, opts: Any, op: Any) -> Work:
        how = self._reduction_of(opts, op, tensor.dtype)
        if how.op is not Op.SUM or how.fold or how.factor is not None or tensor.dtype not in WIRE:
            raise UsageError(
                f"all_reduce of a sparse tensor of dtype {tensor.dtype}: only SUM and AVG of numbers; use to_dense()"
            )
        self._input_check.check("all_reduce of a sparse tensor", [tensor], how)
        limit_s = self._timeout_s(opts)
        sparse = SparseSum(self._collectives, self._members, "all_reduce of a sparse tensor", limit_s)
        return self._record(sparse.start(tensor, how.average))

    def _reduce(
        self, what: str, tensors: list[torch.Tensor], outputs: list[torch.Tensor], opts: Any, op: Any = None
    ) -> Work:
        how = self._reduction_of(opts, op, tensors[0].dtype)
        if how.fold is not None:
            return self._fold(what, tensors, outputs, how, self._timeout_s(opts))
        self._input_check.check(what, tensors, how)
        how = self._coded(how, tensors)
        is_awaited = not getattr(opts, "asyncOp", True)
        limit_s = self._timeout_s(opts)
        if not (how.average and is_summed_wider(tensors[0].dtype)):
            return self._record(self._collectives.reduce(Call(what, outputs, limit_s), tensors, how, is_awaited))
        for output in outputs:
            check_writable(output)
        sums = [summands(tensor) for tensor in tensors]
        call = Call(what, sums if outputs else [], limit_s)
        work = self._collectives.reduce(call, sums, _sum_of(tensors[0].dtype), is_awaited)
        return self._divide(work, Call(what, outputs, limit_s), sums)

    def _divide(self, work: Work, call: Call, sums: Sequence[torch.Tensor]) -> Work:
        """The last part of an average of integers, after a sum in a wider dtype, which their own may not hold."""

        def divide() -> None:
            for output, total in zip(call.outputs, sums, strict=False):  # reduce: outputs only on the root
                assign(output, mean(total, self.size(), output.dtype, "floor"))

        return self._with_finish(work, call, divide)

    def _with_finish(self, work: Work, call: Call, finish: Callable[[], None]) -> Work:
        return self._record(CombinedWork(self._group_context, call._replace(finish=finish), [work]))

    def _coded(self, how: Reduction, tensors: Sequence[torch.Tensor]) -> Reduction:
        """``how``, with the codec of the group's compression if such a sum has one: see ProcessGroupOptions."""
        compression = getattr(self._options, "compression", Compressor)
        dtype, session = tensors[0].dtype, self._members.session
        if compression.codec is None or how.op is not Op.SUM or how.view is not None or dtype not in _CODED_DTYPES:
            return how
        first = session.rank - session.local_rank
        if all(first <= rank < first + session.local_size for rank in self._members.ranks):
            return how  # nothing travels between machines
        nbytes = sum(tensor.nbytes for tensor in tensors)
        codec = codec_for(compression, dtype, nbytes, self._members.prefix, self._members.context.settings)
        return how if codec is None else replace(how, codec=codec)

    def _reduce_scatter(self, what: str, inputs: list[torch.Tensor], output: torch.Tensor, opts: Any) -> Work:
        how = self._reduction_of(opts, None, output.dtype)
        if how.fold is not None:
            return self._reduce_uneven(
                output, list(torch.cat([t.reshape(-1) for t in inputs]).chunk(self.size())), opts
            )
        self._input_check.check(what, inputs, how)
        how = self._coded(how, inputs)
        is_awaited = not getattr(opts, "asyncOp", True)
        call = Call(what, [output], self._timeout_s(opts))
        if not (how.average and is_summed_wider(output.dtype)):
            return self._record(self._collectives.reduce_scatter(call, inputs, how, is_awaited))
        check_writable(output)
        sums, total = [summands(tensor) for tensor in inputs], summands(output)
        work = self._collectives.reduce_scatter(
            Call(what, [total], call.timeout_s), sums, _sum_of(output.dtype), is_awaited
        )
        return self._divide(work, call, [total])

    def _reduce_uneven(self, output: torch.Tensor, inputs: list[torch.Tensor], opts: Any) -> Work:
        """Reduce and scatter pieces of different sizes: every member gets the whole result and keeps its own piece."""
        whole = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        first = sum(tensor.numel() for tensor in inputs[: self.rank()])
        work = self._reduce("reduce_scatter", [whole], [whole], opts)
        piece = whole[first : first + output.numel()].view(output.shape)
        call = Call("reduce_scatter", [output], self._timeout_s(opts))
        return self._with_finish(work, call, lambda: assign(output, piece))

    def _fold(
        self, what: str, tensors: list[torch.Tensor], outputs: list[torch.Tensor], how: Reduction, timeout_s: float
    ) -> Work:
        """An operation that servers don't have: every member gathers all tensors and combines them in rank order."""
        fold = how.fold
        copies = [[torch.empty_like(tensor, requires_grad=False) for tensor in tensors] for _ in range(self.size())]

        def combine() -> None:
            for at, output in enumerate(outputs):
                total = copies[0][at]
                for other in copies[1:]:
                    total = fold(total, other[at]) if fold is not None else total
                assign(output, total)

        return self._record(
            self._collectives.move(what, GroupTransfer.gather(tensors, copies, outputs, combine), timeout_s)
        )

    def _reduction_of(self, opts: Any, op: Any, dtype: torch.dtype) -> Reduction:
        torch_op = op if op is not None else opts if isinstance(opts, dist.ReduceOp) else getattr(opts, "reduceOp", SUM)
        return reduction_of(torch_op, dtype)


def _sum_of(dtype: torch.dtype) -> Reduction:
    return Reduction(Op.SUM, terms=f"average of {str(dtype).removeprefix('torch.')}")
