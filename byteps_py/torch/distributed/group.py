"""The process group: every collective of torch.distributed, each as a reduction, a gather or an exchange.

Owns nothing but the parts that carry operations out. Any thread may call; operations of a group go in the order of the
calls, which must be the same on all its members.

    SUM AVG MIN MAX PRODUCT PREMUL_SUM, broadcast, barrier   reductions.py: through the summation servers
    gathers, all-to-all, scatter, BAND BOR BXOR              direct.py: from member to member
    send, recv                                               point_to_point.py: between two members
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store

from byteps_py.errors import CommunicationError, UsageError
from byteps_py.torch.distributed import monitoring
from byteps_py.torch.distributed.arguments import Reduction, Tensors, alone, listed, reduction_of, seconds
from byteps_py.torch.distributed.compilation import not_traced
from byteps_py.torch.distributed.completion import Completer
from byteps_py.torch.distributed.direct import After, Direct
from byteps_py.torch.distributed.identity import Identity
from byteps_py.torch.distributed.journal import Journal
from byteps_py.torch.distributed.members import Members
from byteps_py.torch.distributed.point_to_point import PointToPoint
from byteps_py.torch.distributed.reductions import Reductions
from byteps_py.torch.distributed.work import Pending, Surroundings, Together

SUM = dist.ReduceOp.SUM


_CALLED = """
    allreduce allreduce_coalesced reduce reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced broadcast
    barrier allgather allgather_coalesced _allgather_base allgather_into_tensor_coalesced gather scatter alltoall
    alltoall_base send recv recv_anysource _start_coalescing _end_coalescing monitored_barrier
""".split()


@not_traced(_CALLED)
class BytePSProcessGroup(Identity):
    """See torch.distributed.ProcessGroup. All tensors dense, on cpu or cuda; non-reducing operations take any dtype."""

    def __init__(
        self,
        members: Members,
        store: Store,
        timeout_s: float,
        options: Backend.Options,
        leave: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(members.position, members.count, options)
        self._members = members
        self._store = store
        self._leave = leave
        self._around = Surroundings(timeout_s, Journal(members, store))
        self._completer = Completer()
        self._reductions = Reductions(members, self._around, self._completer)
        self._direct = Direct(members, self._around, self._completer)
        self._channels = PointToPoint(members, self._around)
        self._coalesced: list[Pending] | None = None

    # ---- reductions ------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None, op: Any = None) -> Pending:
        """Reduce a tensor over all members, in place."""
        tensor = alone(listed(tensors), "allreduce")
        return self._reduce("all_reduce", [tensor], [tensor], opts, op)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Pending:
        """Reduce several tensors, in place: those of one dtype as one."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for tensor in listed(tensors):
            by_dtype[tensor.dtype].append(tensor)
        works = [self._reduce("all_reduce_coalesced", some, some, opts) for some in by_dtype.values()]
        return self._together("all_reduce_coalesced", works, listed(tensors), opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Pending:
        """Reduce a tensor to the root. It costs an all-reduce: the sum is there for everybody; only the root takes it."""
        tensor = alone(listed(tensors), "reduce")
        outputs = [tensor] if opts is None or opts.rootRank == self.rank() else []
        return self._reduce("reduce", [tensor], outputs, opts)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Pending:
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

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Pending:
        """Reduce a tensor of which each member gets an even share of rows."""
        listed([output, input])
        if input.numel() != output.numel() * self.size():
            raise UsageError(
                f"reduce_scatter_tensor: an input of {input.numel()} elements for {self.size()} ranks and an output of "
                f"{output.numel()}; the input must be {self.size()} times as large"
            )
        return self._reduce_scatter("reduce_scatter_tensor", [input], output, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Pending:
        pairs = zip(listed(outputs), listed(inputs), strict=True)
        works = [self._reduce_scatter_base(output, input, opts) for output, input in pairs]
        return self._together("reduce_scatter_tensor_coalesced", works, listed(outputs), opts)

    def broadcast(self, tensors: Tensors, opts: Any = None, root: int | None = None) -> Pending:
        """Copy the root's tensor to all."""
        tensor = alone(listed(tensors), "broadcast")
        source = root if root is not None else opts if isinstance(opts, int) else opts.rootRank if opts else 0
        return self._record(self._reductions.broadcast("broadcast", tensor, source, self._limit(opts)))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Pending:
        """Done when every member has called it."""
        limit_s = timeout.total_seconds() if timeout else self._limit(opts)
        token = torch.zeros(1, dtype=torch.uint8)
        return self._record(self._reductions.reduce("barrier", [token], [], Reduction(), limit_s))

    def _reduce(
        self, what: str, tensors: list[torch.Tensor], outputs: list[torch.Tensor], opts: Any, op: Any = None
    ) -> Pending:
        how = self._how(opts, op, tensors[0].dtype)
        if how.fold is not None:
            return self._fold(what, tensors, outputs, how, self._limit(opts))
        return self._record(self._reductions.reduce(what, tensors, outputs, how, self._limit(opts)))

    def _reduce_scatter(self, what: str, inputs: list[torch.Tensor], output: torch.Tensor, opts: Any) -> Pending:
        how = self._how(opts, None, output.dtype)
        if how.fold is not None:
            return self._reduce_uneven(
                output, list(torch.cat([t.reshape(-1) for t in inputs]).chunk(self.size())), opts
            )
        return self._record(self._reductions.reduce_scatter(what, inputs, output, how, self._limit(opts)))

    def _reduce_uneven(self, output: torch.Tensor, inputs: list[torch.Tensor], opts: Any) -> Pending:
        """With pieces of different sizes: everybody gets the whole result and keeps its own piece."""
        whole = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        first = sum(tensor.numel() for tensor in inputs[: self.rank()])
        work = self._reduce("reduce_scatter", [whole], [whole], opts)
        piece = whole[first : first + output.numel()].view(output.shape)
        return _Then(
            self._around, "reduce_scatter", [work], [output], self._limit(opts), lambda: _assign(output, piece)
        )

    def _fold(
        self, what: str, tensors: list[torch.Tensor], outputs: list[torch.Tensor], how: Reduction, timeout_s: float
    ) -> Pending:
        """What no server can do: everybody gets everybody's tensors and combines them, in the order of the ranks."""
        fold = how.fold
        copies = [[torch.empty_like(tensor, requires_grad=False) for tensor in tensors] for _ in range(self.size())]

        def combine() -> None:
            for at, output in enumerate(outputs):
                total = copies[0][at]
                for other in copies[1:]:
                    total = fold(total, other[at]) if fold is not None else total
                _assign(output, total)

        return self._record(self._direct.gather(what, tensors, copies, timeout_s, After(outputs, combine)))

    def _how(self, opts: Any, op: Any, dtype: torch.dtype) -> Reduction:
        asked = op if op is not None else opts if isinstance(opts, dist.ReduceOp) else getattr(opts, "reduceOp", SUM)
        return reduction_of(asked, dtype)

    # ---- gathers ---------------------------------------------------------------------------------------

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Pending:
        """Everybody's tensor to everybody. Sizes may differ, if all members know them."""
        outputs = listed(alone(output_tensors, "all_gather"))
        tensor = alone(listed(input_tensors), "all_gather")
        self._check_count("all_gather", outputs)
        pieces = [[output] for output in outputs]
        return self._record(self._direct.gather("all_gather", [tensor], pieces, self._limit(opts)))

    def allgather_coalesced(self, output_lists: Any, input_list: Tensors, opts: Any = None) -> Pending:
        """Several tensors of everybody, at once."""
        inputs = listed(input_list)
        pieces = [listed(outputs) for outputs in output_lists]
        if len(pieces) == self.size() and len(inputs) != self.size():
            by_member = pieces
        else:  # a list of all members' for each input, as with ``allgather``
            by_member = [list(member) for member in zip(*pieces, strict=True)]
        self._check_count("all_gather_coalesced", by_member)
        return self._record(self._direct.gather("all_gather_coalesced", inputs, by_member, self._limit(opts)))

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Pending:
        """Everybody's tensor, end to end."""
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Pending:
        """Several tensors of everybody, each end to end."""
        targets, sources = listed(outputs), listed(inputs)
        for output, input in zip(targets, sources, strict=True):
            if output.numel() != input.numel() * self.size() or output.dtype is not input.dtype:
                raise UsageError(
                    f"all_gather_into_tensor: an output of {output.dtype}{list(output.shape)} for {self.size()} ranks "
                    f"and an input of {input.dtype}{list(input.shape)}; the output must be {self.size()} times as large"
                )
        plain = [output if output.is_contiguous() else torch.empty_like(output).contiguous() for output in targets]
        shares = [output.detach().view(-1).chunk(self.size()) for output in plain if output.numel()]
        pieces = [[share[member] for share in shares] for member in range(self.size())]

        def land() -> None:
            for output, beside in zip(targets, plain, strict=True):
                if beside is not output:
                    _assign(output, beside)

        some = [tensor for tensor in sources if tensor.numel()]
        after = After(targets, land)
        return self._record(self._direct.gather("all_gather_into_tensor", some, pieces, self._limit(opts), after))

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Pending:
        """Everybody's tensor to the root, which alone gives outputs."""
        tensor = alone(listed(input_tensors), "gather")
        root = opts.rootRank if opts is not None else 0
        outputs = listed(alone(output_tensors, "gather")) if self.rank() == root else []
        if self.rank() == root:
            self._check_count("gather", outputs)
        sends = [[tensor] if member == root else [] for member in range(self.size())]
        receives = [[output] for output in outputs] or [[] for _ in range(self.size())]
        return self._record(self._direct.exchange("gather", sends, receives, self._limit(opts)))

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Pending:
        """From the root, which alone gives inputs, a tensor to each member."""
        output = alone(listed(output_tensors), "scatter")
        root = opts.rootRank if opts is not None else 0
        inputs = listed(alone(input_tensors, "scatter")) if self.rank() == root else []
        if self.rank() == root:
            self._check_count("scatter", inputs)
        sends = [[tensor] for tensor in inputs] or [[] for _ in range(self.size())]
        receives = [[output] if member == root else [] for member in range(self.size())]
        return self._record(self._direct.exchange("scatter", sends, receives, self._limit(opts)))

    # ---- all to all ------------------------------------------------------------------------------------

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Pending:
        """A tensor to each member, and from each one."""
        outputs, inputs = listed(output_tensors), listed(input_tensors)
        self._check_count("all_to_all", outputs)
        self._check_count("all_to_all", inputs)
        sends, receives = [[tensor] for tensor in inputs], [[tensor] for tensor in outputs]
        return self._record(self._direct.exchange("all_to_all", sends, receives, self._limit(opts)))

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Pending:
        """Rows to each member, and from each one: as many as the split sizes say, by default equally many."""
        listed([output, input])
        plain = output if output.is_contiguous() else torch.empty_like(output).contiguous()
        sends = self._rows("all_to_all_single", input, input_split_sizes)
        receives = self._rows("all_to_all_single", plain, output_split_sizes)
        after = After([output], _nothing if plain is output else lambda: _assign(output, plain))
        return self._record(self._direct.exchange("all_to_all_single", sends, receives, self._limit(opts), after))

    def _rows(self, what: str, tensor: torch.Tensor, sizes: Sequence[int] | None) -> list[list[torch.Tensor]]:
        rows = tensor.shape[0] if tensor.dim() else 0
        if not sizes:
            if rows % self.size():
                raise UsageError(
                    f"{what}: {rows} rows can't be split evenly among {self.size()} ranks; give split sizes"
                )
            sizes = [rows // self.size()] * self.size()
        if len(sizes) != self.size() or sum(sizes) != rows:
            raise UsageError(f"{what}: split sizes {list(sizes)} for {self.size()} ranks and {rows} rows")
        return [[piece] for piece in tensor.detach().split(list(sizes))]

    # ---- two members -----------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Pending:
        """To the member at ``dst``. Over as soon as the tensor is copied."""
        return self._record(self._channels.send(alone(listed(tensors), "send"), dst, tag))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Pending:
        """From the member at ``src``: its next message with this tag."""
        return self._record(self._channels.receive(alone(listed(tensors), "recv"), src, tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Pending:
        """From whichever member's message with this tag comes first."""
        return self._record(self._channels.receive_from_anybody(alone(listed(tensors), "recv"), tag))

    # ---- coalescing ------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Pending:
        works, self._coalesced = self._coalesced or [], None
        return Together(self._around, "coalesced operations", works, [], self._around.timeout_s)

    def _record(self, work: Pending) -> Pending:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _together(self, what: str, works: Sequence[Pending], outputs: list[torch.Tensor], opts: Any) -> Pending:
        return works[0] if len(works) == 1 else Together(self._around, what, works, outputs, self._limit(opts))

    # ---- life ------------------------------------------------------------------------------------------

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Like barrier, and the error names the members that have not come."""
        limit_s = timeout.total_seconds() if timeout else self._around.timeout_s
        monitoring.barrier(self._store, self._members, limit_s, wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        self._around.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def get_group_store(self) -> Store:
        return self._store

    def abort(self) -> None:
        """End all waits for operations of this group with an error, and refuse new ones."""
        self._around.aborted = CommunicationError(f"process group {self.group_name!r} was aborted")

    def shutdown(self) -> None:
        """No more operations. The world's group also leaves the job, unless init() has joined it."""
        if self._around.aborted is None:
            self._around.aborted = UsageError(f"process group {self.group_name!r} was destroyed")
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def _limit(self, opts: Any) -> float:
        return seconds(opts, self._around.timeout_s)

    def _check_count(self, what: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self.size():
            raise UsageError(f"{what}: expected a tensor for each of {self.size()} ranks, got {len(tensors)}")

    # ---- the same by their names from torch 2.13 on -----------------------------------------------------

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


class _Then(Together):
    """Works, and what is left to do after them."""

    def __init__(
        self,
        around: Surroundings,
        what: str,
        works: Sequence[Pending],
        outputs: list[torch.Tensor],
        timeout_s: float,
        then: Callable[[], None],
    ) -> None:
        super().__init__(around, what, works, outputs, timeout_s)
        self._then = then

    def _complete(self, deadline: float) -> None:
        super()._complete(deadline)
        self._then()


def _assign(target: torch.Tensor, source: torch.Tensor) -> None:
    target.detach().copy_(source.view(target.shape))


def _nothing() -> None:
    """Nothing is left to do."""
