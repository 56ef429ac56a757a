"""What other ranks send in the collectives of torch, and write down for each other there."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, MismatchError
from byteps_py.session import Session, Slot
from byteps_py.tensors import DType, Layout, Op, TensorSpec
from byteps_py.torch.collectives.completion import Completer
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.group_collectives import GroupCollectives
from byteps_py.torch.collectives.group_work import CallLog, GroupContext
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.row_owners import table_of
from byteps_py.torch.collectives.slot_view import TensorRequest
from byteps_py.torch.gradients.bucket import BucketParts, GradientOptions, ToGradient
from byteps_py.torch.gradients.gradient_checksums import Scratch
from byteps_py.torch.gradients.sparse_bucket import SparseBucket
from byteps_py.torch.operations import size_headers
from byteps_py.torch.operations.gathers import AllgatherOperation, AlltoallOperation
from byteps_py.torch.process_group.reduction_collectives import SparseSum

from .base import Target

_RANKS = 3
_MOST_BYTES = 1 << 24  # what the service of this machine has
_SETTINGS = Settings(num_workers=_RANKS, job_id="fuzz")


class _Session(Session):
    """Rank 1 of three, on a machine each. What the others give is ``said``, in turn, and begins with zeros anew; what
    this one gives is there as it is."""

    rank, size, local_rank, local_size, machine_index, num_machines = 1, _RANKS, 0, 1, 1, _RANKS

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.largest = 0  # memory asked for, in bytes
        self.exchanges = 0
        self._slots: dict[str, Slot] = {}

    def declare(self, specs: Sequence[TensorSpec]) -> list[Slot]:
        return [self._declare(spec) for spec in specs]

    def _declare(self, spec: TensorSpec) -> Slot:
        slot = self._slots.get(spec.name)
        if slot is None or not spec.fits_in(slot.spec):
            self.largest = max(self.largest, spec.nbytes, spec.result_nbytes(self.rank, self.size))
            if self.largest > _MOST_BYTES:
                raise BytePSError("there is not so much memory")
            memory = [memoryview(bytearray(n)) for n in (spec.nbytes, spec.result_nbytes(self.rank, self.size))]
            slot = self._slots[spec.name] = Slot(spec, (memory[0],), memory[1])
        return slot

    def hand_over(self, slot: Slot, nbytes: int | None = None, layout: Layout | None = None) -> None:
        assert layout is not None
        layout.check(slot.spec, _RANKS)
        self.exchanges += slot.spec.op is Op.EXCHANGE
        given = bytes(slot.input)
        for rank, (offset, length) in enumerate(layout.receives):
            if rank == self.rank:
                start, sent = layout.sends[0 if len(layout.sends) == 1 else rank]
                assert length in (0, sent)  # 0: it is there
                data = given[start : start + length]
            else:
                data = self.said.pop(0)[:length] if self.said else b""
            slot.result[offset : offset + length] = data.ljust(length, b"\0")
        slot.round += 1
        slot.done_round = slot.round

    def is_done(self, slot: Slot) -> bool:
        return True

    def wait(self, slot: Slot, timeout_s: float | None = None) -> None: ...
    def barrier(self, timeout_s: float | None = None) -> None: ...

    def join(self, timeout_s: float | None = None) -> int:
        return 0

    def close(self) -> None: ...


class _Direct:
    """A round from rank to rank: what the others have said is there at once, and so is what they send."""

    group = SimpleNamespace(others={0: 0, 2: 2})

    def __init__(self, session: _Session, operation: AllgatherOperation | AlltoallOperation) -> None:
        self._session = session
        self._mine = operation._first_message()

    def carry_out(self, complete: Callable[[torch.Tensor], None]) -> None:
        every = torch.zeros(_RANKS, self._mine.numel(), dtype=torch.uint8)
        every[1] = self._mine
        for rank in self.group.others:
            data = bytearray(self._session.said.pop(0)[: self._mine.numel()])
            if data:
                every[rank, : len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        complete(every)

    def is_direct(self, nbytes: int) -> bool:
        return nbytes % 8 != 0

    def check(self, sent: int, received: int) -> None:
        TensorSpec("direct", DType.UINT8, (sent, received), Op.EXCHANGE)
        if received > _MOST_BYTES:
            raise BytePSError("there is not so much memory")

    def exchange(self, sends: Any, receives: dict[int, Any], owner: tuple[Any, Any]) -> None:
        outputs = owner[1] if isinstance(owner[1], list) else [owner[1]]
        memory = [range(output.data_ptr(), output.data_ptr() + output.nbytes) for output in outputs]
        for address, nbytes in (span for spans in receives.values() for span in spans):
            assert not nbytes or any(address in piece and address + nbytes <= piece.stop for piece in memory)

    def report(self) -> None: ...


def _words(*numbers: int) -> bytes:
    return np.array(numbers, np.int64).tobytes()


def _row_header(kind: str, rows: int, number: int = 1) -> bytes:
    return _words(*size_headers.header(kind, torch.zeros(1, 3), None, rows, number))


def _elements(*indices: int) -> bytes:
    """Indices, then values."""
    return _words(*indices) + np.ones(3 * len(indices), np.float32).tobytes()


_GATHER, _ALLTOALL, _ROWS, _SUM = range(4)
_LIMITS = (0, 1, 2, 3, 11, 12, 13, -1, 1 << 20, 1 << 40, 1 << 62, -(1 << 63))


_AGREED = (
    _row_header("allgather", 2), _row_header("alltoall", 2), _words(3, 1), _words(3, 0, 1, 12, 3)
)  # fmt: skip


class Collectives(Target):
    """Gathers and exchanges of tensors, sparse gradients, sparse sums: what comes is taken, or an error of ours; memory
    is as much as was agreed on, and all that a sparse tensor says of itself is true."""

    cost = 10
    #: Which operation; then, cut in four, what the others say at first, and what they say then.
    seeds = (
        *[bytes((_GATHER,)) + _row_header("allgather", rows) for rows in _LIMITS],
        *[bytes((_ALLTOALL,)) + _row_header("alltoall", rows) for rows in _LIMITS],
        *[bytes((kind,)) + 2 * _row_header("allgather", 2, 2) for kind in (_GATHER, _ALLTOALL)],
        *[
            bytes((_ROWS,)) + _words(rows, dimensions)
            for rows in _LIMITS
            for dimensions in (0, 1, 1, 1, 2, 3, -1, 1 << 62)
        ],
        *[bytes((_SUM,)) + _words(rows, dtype, *shape) for rows in _LIMITS for dtype, *shape in (
            (0, 1, 12, 3), (0, 1, 12, 3), (1, 1, 12, 3), (99, 1, 12, 3), (0, 2, 12, 3), (0, 1, 13, 3), (-1, -1, -1, -1),
        )],
    )  # fmt: skip

    def __init__(self) -> None:
        self._session = _Session()
        self._context = Context(lambda settings: self._session)
        self._context.open(_SETTINGS)
        self._turn = self._done = self._failed = 0
        members = Members(self._context, self._session, tuple(range(_RANKS)), 1, "fuzz")
        self._members = members
        around = GroupContext(self._session, 5.0, CallLog(members, cast(Any, _Store())), 1.0)
        self._around = around
        self._collectives = GroupCollectives(members, around, Completer(), None)
        indices = torch.tensor([[1, 4, 11]])
        self._gradient = torch.sparse_coo_tensor(
            indices, torch.ones(3, 3), (12, 3), is_coalesced=True, check_invariants=True
        )

    def feed(self, data: bytes) -> None:
        self._turn += 1
        if not data:
            return
        which, first = data[0] % 4, data[1:]
        # Where they lie is as the header says, or not.
        places = [0, 5, 11] if self._turn % 3 else [number * 7919 - 3 for number in range(len(data) % 16)]
        then = _elements(*places) if self._turn % 2 else data * 9
        self._session.said = [first, first, then, then, then, then]
        for other in range(2):
            if self._turn // 4 % 4 > 2 - other:  # one, or both, agree with this rank
                self._session.said[other] = _AGREED[which]
        self._session.largest = 0
        try:
            (self._gather, self._alltoall, self._rows, self._sum)[which]()
        except BytePSError as error:
            str(error).encode()
            self._failed += 1
        else:
            self._done += 1
        if which in (_ROWS, _SUM):
            assert self._session.largest < 1 << 14
        if self._session.largest:  # what has room is not declared again
            self._session._slots.clear()
            self._context._leave()
            self._context.open(_SETTINGS)
            self._collectives = GroupCollectives(self._members, self._around, Completer(), None)

    def _gather(self) -> None:
        tensors = [torch.ones(2, 3)] * (1 + self._turn % 2)
        words = [size_headers.header("allgather", tensor, None, number_of_tensors=len(tensors)) for tensor in tensors]
        gather = AllgatherOperation(self._context, "gather", tensors, words, ())
        outputs = self._completed(gather)
        assert [tuple(output.shape[1:]) for output in outputs] == [(3,)] * len(tensors)

    def _alltoall(self) -> None:
        tensor = torch.ones(6, 0 if self._turn % 8 == 0 else 3)
        exchange = AlltoallOperation(self._context, "alltoall", tensor, [2] * 3, (), torch.device("cpu"))
        output, splits = self._completed(exchange)
        assert len(output) == int(splits.sum())

    def _completed(self, operation: AllgatherOperation | AlltoallOperation) -> Any:
        """Through the service, or from rank to rank."""
        if self._turn % 2:
            operation.begin(background=False)
        else:
            operation._direct = cast(Any, _Direct(self._session, operation))
        return operation.complete()

    def _rows(self) -> None:
        param = torch.nn.Parameter(torch.zeros(12, 3))
        param.grad = self._gradient.clone() if self._turn % 8 else None
        spec = TensorSpec("rows", DType.FLOAT32, (36,))
        request = TensorRequest(spec, torch.float32, ((36,),), torch.device("cpu"))
        bucket = SparseBucket(
            self._context, BucketParts(request, ["rows"], [param], GradientOptions(), 0, Scratch(), ToGradient())
        )
        bucket.mark(0, param.grad)
        bucket.start()
        while bucket.advance():
            pass
        bucket.receive()
        assert param.grad is not None
        self._check(param.grad)

    def _sum(self) -> None:
        tensor = self._gradient.clone()
        SparseSum(self._collectives, self._members, "all_reduce", 5.0).start(tensor, False).wait()
        self._check(tensor)

    @staticmethod
    def _check(tensor: torch.Tensor) -> None:
        torch.sparse_coo_tensor(tensor.indices(), tensor.values(), tensor.shape, check_invariants=True)

    def end(self) -> None:
        assert self._done
        assert self._failed

    def close(self) -> None:
        self._context.close()


_TABLE = (64, 4096)  # rows are long: of few, the sums of those in common pay already
_OWN_ROWS = (1, 4, 5, 9, 11, 20, 41, 63)


def _of_rows(rows: int, machine: int, *facts: int) -> bytes:
    """What a rank says of a gradient first, and of a sum."""
    table, dtype, dimensions, *shape = (
        *facts,
        *(table_of(_TABLE, torch.float32, torch.float32), 0, 1, *_TABLE)[len(facts) :],
    )
    return _words(rows, dimensions, machine, table) + _words(rows, machine, dtype, dimensions, *shape)


def _numbers(*rows: int) -> bytes:
    return np.array(rows, np.int32).tobytes()


class RowMessages(Target):
    """Rows that go to their owners, of gradients and of sums: what comes is taken, or an error of ours; memory is as
    much as was agreed on, and all that the sum says of itself is true."""

    cost = 100
    #: What the others say at first of a gradient (32 bytes) and of a sum (48), and which rows they have.
    seeds = (
        *[_of_rows(rows, at) + _numbers(*_OWN_ROWS) for rows in (*_LIMITS, 8, 8, 64, 65) for at in (0, 1, -7)],
        *[_of_rows(8, 0, *facts) + _numbers(*_OWN_ROWS) for facts in ((7,), (7, 1), (7, -1), (7, 0, 2), (7, 0, 1, 65))],
        *[_of_rows(8, 2) + _numbers(*rows) for rows in (
            range(8), range(50, 58), range(57, 65), [3] * 8, range(8, 0, -1), range(-3, 5), [1 << 30] * 8,
        )],
    )  # fmt: skip

    def __init__(self) -> None:
        self._turn = self._done = self._failed = 0
        self._owned = [0, 0]
        self._kept = torch.sparse_coo_tensor(
            torch.tensor([_OWN_ROWS]), torch.ones(len(_OWN_ROWS), _TABLE[1]), _TABLE, is_coalesced=True,
            check_invariants=True,
        )  # fmt: skip
        self._param = torch.nn.Parameter(torch.zeros(_TABLE))
        self._begin()

    def _begin(self) -> None:
        self._session = _Session()
        self._context = Context(lambda settings: self._session)
        self._context.open(_SETTINGS)

    def feed(self, data: bytes) -> None:
        self._turn += 1
        turn, which = self._turn, self._turn % 2
        header, rows = (data[:32], data[32:80])[which], data[80:]
        headers, numbers = [header, header], [rows, rows]
        for other, machine in enumerate((0, 2)):
            if turn // 2 % 4 > other:  # neither, the first, or both say what is right
                true = _of_rows(len(_OWN_ROWS), machine)
                headers[other] = (true[:32], true[32:])[which]
            if turn // 8 % 4 > other:
                numbers[other] = _numbers(*(_OWN_ROWS if turn % 3 else range(8)))
        self._session.said = [*headers, *numbers, *[data * 9] * 4]
        before = self._session.exchanges
        try:
            self._sum() if which else self._gradient()
        except BytePSError as error:
            str(error).encode()
            self._failed += 1
        else:
            self._done += 1
        self._owned[which] += self._session.exchanges > before
        assert self._session.largest <= 1 << 22
        self._context.close()
        self._begin()

    def _gradient(self) -> None:
        param = self._param
        param.grad = self._kept.clone()
        spec = TensorSpec("rows", DType.FLOAT32, (param.numel(),))
        request = TensorRequest(spec, torch.float32, (_TABLE,), torch.device("cpu"))
        bucket = SparseBucket(
            self._context, BucketParts(request, ["rows"], [param], GradientOptions(), 0, Scratch(), ToGradient())
        )
        bucket.mark(0, param.grad)
        bucket.start()
        while bucket.advance():
            pass
        bucket.receive()
        Collectives._check(param.grad)

    def _sum(self) -> None:
        members = Members(self._context, self._session, tuple(range(_RANKS)), 1, "fuzz")
        around = GroupContext(self._session, 5.0, CallLog(members, cast(Any, _Store())), 1.0)
        collectives, tensor = GroupCollectives(members, around, Completer(), None), self._kept.clone()
        SparseSum(collectives, members, "all_reduce", 5.0).start(tensor, self._turn % 4 == 1).wait()
        Collectives._check(tensor)

    def end(self) -> None:
        assert self._done
        assert self._failed
        assert all(self._owned)

    def close(self) -> None:
        self._context.close()


class _Store:
    """torch's, with what one other member has written."""

    def __init__(self) -> None:
        self.written = b"[]"

    def set(self, key: str, value: str) -> None:
        json.loads(value)

    def check(self, keys: list[str]) -> bool:
        return True

    def get(self, key: str) -> bytes:
        return self.written


class Calls(Target):
    """What members of a group have called last, as they wrote it down: they differ, or not, or it can't be read."""

    _own = ((1, "all_reduce: 4 float32", "a"), (2, "broadcast", "b"), (3, "barrier", "c"))
    seeds = (
        json.dumps([(number, (what, name)) for number, what, name in _own]).encode(),
        json.dumps([(2, ("broadcast", "other")), (3, ("barrier", "other"))]).encode(),
        json.dumps([(2, ("all_gather", "other")), (7, ("\ud800", "x"))]).encode(),
        json.dumps([(1 << 80, ("x", 1)), (-1, (None, []))]).encode(),
        b"[[1e999, [1, 2]]]",
        b"[]",
        b"{}",
        b"null",
        b"[" * 9000,
        b"9" * 5000,
        b"\xff\xfe",
    )

    def __init__(self) -> None:
        context = Context(lambda settings: _Session())
        context.open(_SETTINGS)
        self._store = _Store()
        members = Members(context, context.session, (0, 1, 2), 1, "fuzz")
        self._journal = CallLog(members, cast(Any, self._store))
        for _, what, name in self._own:
            self._journal.record((what,), name)
        self._said = self._differ = 0

    def feed(self, data: bytes) -> None:
        self._store.written = data
        try:
            self._said += bool(self._journal.compare(3))
        except MismatchError:
            self._differ += 1

    def end(self) -> None:
        assert self._said
        assert self._differ
