"""Collectives that go through the summation servers, if there are any: reductions, broadcast, barrier. Any thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from byteps_py.errors import UsageError
from byteps_py.tensors import Op
from byteps_py.torch.collectives.dtypes import WIRE
from byteps_py.torch.collectives.group_collectives import GroupTransfer, Reduction
from byteps_py.torch.collectives.group_work import CombinedWork
from byteps_py.torch.collectives.integer_averages import is_summed_wider, mean, summands
from byteps_py.torch.collectives.tensor_bytes import check_writable
from byteps_py.torch.collectives.work import Call, Work, timeout_s_of
from byteps_py.torch.compression import Compressor, codec_for
from byteps_py.torch.process_group.group_base import GroupBase, Tensors, assign, dense_tensors, only, reduction_of
from byteps_py.torch.process_group.sparse_sum import SparseSum

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
        if how.fold is not None or self._coded(how, inputs).codec is not None:  # members get the whole coded sum
            return self._reduce_uneven(
                output, list(torch.cat([t.reshape(-1) for t in inputs]).chunk(self.size())), opts
            )
        self._input_check.check(what, inputs, how)
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
