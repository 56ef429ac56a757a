"""The collectives that reduce, and those that go the same way: through the summation servers, if there are any."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from byteps_py.errors import UsageError
from byteps_py.tensors import Op
from byteps_py.torch.engine.group_engine import GroupTransfer, Reduction
from byteps_py.torch.engine.group_work import CombinedWork
from byteps_py.torch.engine.integer_averages import is_summed_wider, mean, summands
from byteps_py.torch.engine.tensor_bytes import check_writable
from byteps_py.torch.engine.work import Call, Work, limit_of
from byteps_py.torch.process_group import sparse_sum
from byteps_py.torch.process_group.collective_arguments import (
    Tensors,
    alone,
    listed,
    reduction_of,
)
from byteps_py.torch.process_group.group_base import GroupBase, assign

SUM = dist.ReduceOp.SUM


class ReductionCollectives(GroupBase):
    """See torch.distributed.ProcessGroup for the methods."""

    def allreduce(self, tensors: Tensors, opts: Any = None, op: Any = None) -> Work:
        """Reduce a tensor over all members, in place. Of a sparse one (COO), SUM and AVG; the call then waits until
        all members have made it."""
        given = tensors if isinstance(tensors, torch.Tensor) else alone(tensors, "allreduce")
        if given.layout is torch.sparse_coo:
            return self._add_sparse(given, opts, op)
        tensor = alone(listed(tensors), "allreduce")
        work = self._reduce("all_reduce", [tensor], [tensor], opts, op)
        if tensor.numel() == 1:
            self._tokens.append(work)
        return work

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce several tensors, in place: those of one dtype as one."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for tensor in listed(tensors):
            by_dtype[tensor.dtype].append(tensor)
        works = [self._reduce("all_reduce_coalesced", some, some, opts) for some in by_dtype.values()]
        return self._together("all_reduce_coalesced", works, listed(tensors), opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce a tensor to the root. It costs an all-reduce, of which only the root takes the result."""
        tensor = alone(listed(tensors), "reduce")
        root = opts.rootRank if opts is not None else 0
        self._members.check_root(root)
        outputs = [tensor] if root == self.rank() else []
        return self._reduce("reduce", [tensor], outputs, opts)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Reduce a list of tensors, one for each member."""
        output = alone(listed(output_tensors), "reduce_scatter")
        inputs = listed(alone(input_tensors, "reduce_scatter"))
        if len(inputs) != self.size() or inputs[self.rank()].numel() != output.numel():
            raise UsageError(
                f"reduce_scatter: expected {self.size()} tensors, that of rank {self.rank()} with {output.numel()} "
                f"elements, got {[list(tensor.shape) for tensor in inputs]}"
            )
        if len({tensor.numel() for tensor in inputs}) > 1:
            return self._reduce_uneven(output, inputs, opts)
        return self._reduce_scatter("reduce_scatter", inputs, output, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Reduce a tensor of which each member gets an even share of rows."""
        listed([output, input])
        if input.numel() != output.numel() * self.size():
            raise UsageError(
                f"reduce_scatter_tensor: an input of {input.numel()} elements for {self.size()} ranks and an output of "
                f"{output.numel()}; the input must be {self.size()} times as large"
            )
        return self._reduce_scatter("reduce_scatter_tensor", [input], output, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        pairs = zip(listed(outputs), listed(inputs), strict=True)
        works = [self._reduce_scatter_base(output, input, opts) for output, input in pairs]
        return self._together("reduce_scatter_tensor_coalesced", works, listed(outputs), opts)

    def broadcast(self, tensors: Tensors, opts: Any = None, root: int | None = None) -> Work:
        """Copy the root's tensor to all."""
        tensor = alone(listed(tensors), "broadcast")
        source = root if root is not None else opts if isinstance(opts, int) else opts.rootRank if opts else 0
        return self._record(self._engine.broadcast(Call("broadcast", [tensor], self._limit(opts)), source))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Done when every member has called it."""
        limit_s = limit_of(timeout) or self._limit(opts)
        return self._record(self._engine.barrier(limit_s))

    def _add_sparse(self, tensor: torch.Tensor, opts: Any, op: Any) -> Work:
        how = self._how(opts, op, tensor.dtype)
        if how.op is not Op.SUM or how.fold or how.factor is not None or tensor.dtype not in sparse_sum.DTYPES:
            raise UsageError(
                f"all_reduce of a sparse tensor of dtype {tensor.dtype}: only SUM and AVG of numbers; use to_dense()"
            )
        self._input_check.look("all_reduce of a sparse tensor", [tensor], how)
        limit_s = self._limit(opts)
        work = sparse_sum.sum_up(
            self._engine, self._members, "all_reduce of a sparse tensor", tensor, how.average, limit_s
        )
        return self._record(work)

    def _reduce(
        self, what: str, tensors: list[torch.Tensor], outputs: list[torch.Tensor], opts: Any, op: Any = None
    ) -> Work:
        how = self._how(opts, op, tensors[0].dtype)
        if how.fold is not None:
            return self._fold(what, tensors, outputs, how, self._limit(opts))
        self._input_check.look(what, tensors, how)
        is_awaited = not getattr(opts, "asyncOp", True)
        if how.average and is_summed_wider(tensors[0].dtype):
            return self._average_integers(what, tensors, outputs, opts, is_awaited)
        return self._record(self._engine.reduce(Call(what, outputs, self._limit(opts)), tensors, how, is_awaited))

    def _average_integers(
        self,
        what: str,
        tensors: list[torch.Tensor],
        outputs: list[torch.Tensor],
        opts: Any,
        is_awaited: bool,
    ) -> Work:
        """Their sum might not be one of their dtype's numbers."""
        dtype, limit_s = tensors[0].dtype, self._limit(opts)
        for output in outputs:
            check_writable(output)
        sums = [summands(tensor) for tensor in tensors]
        work = self._engine.reduce(Call(what, sums if outputs else [], limit_s), sums, _sum_of(dtype), is_awaited)

        def divide() -> None:
            for output, total in zip(outputs, sums, strict=False):  # none but on the root
                assign(output, mean(total, self.size(), dtype, "floor"))

        return self._record(CombinedWork(self._around, Call(what, outputs, limit_s, divide), [work]))

    def _reduce_scatter(self, what: str, inputs: list[torch.Tensor], output: torch.Tensor, opts: Any) -> Work:
        how = self._how(opts, None, output.dtype)
        if how.fold is not None:
            return self._reduce_uneven(
                output, list(torch.cat([t.reshape(-1) for t in inputs]).chunk(self.size())), opts
            )
        self._input_check.look(what, inputs, how)
        is_awaited = not getattr(opts, "asyncOp", True)
        if how.average and is_summed_wider(output.dtype):
            return self._average_scattered_integers(what, inputs, output, opts, is_awaited)
        return self._record(
            self._engine.reduce_scatter(Call(what, [output], self._limit(opts)), inputs, how, is_awaited)
        )

    def _average_scattered_integers(
        self, what: str, inputs: list[torch.Tensor], output: torch.Tensor, opts: Any, is_awaited: bool
    ) -> Work:
        dtype, limit_s = output.dtype, self._limit(opts)
        check_writable(output)
        sums, total = [summands(tensor) for tensor in inputs], summands(output)
        how = _sum_of(dtype)
        work = self._engine.reduce_scatter(Call(what, [total], limit_s), sums, how, is_awaited)

        def divide() -> None:
            assign(output, mean(total, self.size(), dtype, "floor"))

        return self._record(CombinedWork(self._around, Call(what, [output], limit_s, divide), [work]))

    def _reduce_uneven(self, output: torch.Tensor, inputs: list[torch.Tensor], opts: Any) -> Work:
        """With pieces of different sizes: everybody gets the whole result and keeps its own piece."""
        whole = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        first = sum(tensor.numel() for tensor in inputs[: self.rank()])
        work = self._reduce("reduce_scatter", [whole], [whole], opts)
        piece = whole[first : first + output.numel()].view(output.shape)
        limit_s = self._limit(opts)
        return self._record(
            CombinedWork(self._around, Call("reduce_scatter", [output], limit_s, lambda: assign(output, piece)), [work])
        )

    def _fold(
        self, what: str, tensors: list[torch.Tensor], outputs: list[torch.Tensor], how: Reduction, timeout_s: float
    ) -> Work:
        """What no server can do: everybody gets everybody's tensors and combines them, in the order of the ranks."""
        fold = how.fold
        copies = [[torch.empty_like(tensor, requires_grad=False) for tensor in tensors] for _ in range(self.size())]

        def combine() -> None:
            for at, output in enumerate(outputs):
                total = copies[0][at]
                for other in copies[1:]:
                    total = fold(total, other[at]) if fold is not None else total
                assign(output, total)

        return self._record(self._engine.move(what, GroupTransfer.gather(tensors, copies, outputs, combine), timeout_s))

    def _how(self, opts: Any, op: Any, dtype: torch.dtype) -> Reduction:
        asked = op if op is not None else opts if isinstance(opts, dist.ReduceOp) else getattr(opts, "reduceOp", SUM)
        return reduction_of(asked, dtype)


def _sum_of(dtype: torch.dtype) -> Reduction:
    return Reduction(Op.SUM, terms=f"average of {str(dtype).removeprefix('torch.')}")
