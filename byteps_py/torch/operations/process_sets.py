"""Process sets: subsets of the ranks, for operations among them alone. Names and rules as in Horovod.

Owns the sets that a context knows. Must not know the operations, which ask ``group_of``. All ranks add and remove sets
together, so that they know the same sets under the same numbers: one thread at a time, in the same order on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from byteps_py.errors import MismatchError, UsageError
from byteps_py.tensors import DType, Layout, Op, TensorSpec
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.slot_view import TensorRequest

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]

_NAME = "byteps_py.process_sets"
_BITS = 62  # of a set's ranks in one int64
_ADD, _REMOVE, _INIT = 1, 2, 3


class ProcessSet:
    """Ranks that run operations together: ``ProcessSet([0, 2])``, or the ranks of an mpi4py communicator.

    Pass it to ``init(process_sets=[…])`` or to ``add_process_set`` before use. Raises UsageError (a ValueError) for
    anything else.

    >>> import torch, byteps_py as hvd
    >>> hvd.init()
    >>> hvd.ProcessSet([0]).included()  # a job of one rank
    True
    >>> hvd.shutdown()
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id: int | None = None
        self._ranks: list[int] | None = None
        self.mpi_comm: Any = None
        ranks = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else None
        if ranks is not None and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
            self._ranks = sorted(ranks)
        elif ranks is None and is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
        else:
            raise UsageError(
                "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object, got "
                f"{ranks_or_comm!r}"
            )

    @property
    def ranks(self) -> list[int] | None:
        """The global ranks, ascending; None for a communicator before ``init``."""
        return self._ranks

    def size(self) -> int | None:
        """The number of ranks; None before the set is added, and after it is removed."""
        return None if self.process_set_id is None else len(_registered(contexts.current(), self))

    def rank(self) -> int | None:
        """This process's number within the set; None if the set is not added. Raises UsageError on other ranks."""
        if self.process_set_id is None:
            return None
        context = contexts.current()
        members = _registered(context, self)
        if context.session.rank not in members:
            raise UsageError(
                f"Process is not part of provided process set: rank {context.session.rank} is not in {self}"
            )
        return members.index(context.session.rank)

    def included(self) -> bool | None:
        """True if this process is in the set; None if the ranks are not known yet."""
        ranks = self.ranks
        return None if ranks is None else contexts.current().session.rank in ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class _GlobalProcessSet(ProcessSet):
    """All ranks of the process's current job."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        context = contexts.current()
        return list(range(context.session.size)) if context.is_open else []


#: All ranks: the default ``process_set`` of every operation.
global_process_set: ProcessSet = _GlobalProcessSet()


def is_communicator(value: object) -> bool:
    """True for an object with the methods of an mpi4py communicator. Does not import mpi4py, which would start MPI."""
    return all(hasattr(value, name) for name in ("Get_rank", "Get_size", "allgather"))


def group_of(process_set: ProcessSet) -> tuple[int, ...]:
    """The ``TensorSpec.group`` of a set: its ranks, or () for all.

    Raises UsageError if the set is not added, or was removed, or if this rank is not in it.
    """
    context = contexts.current()
    session = context.session
    if process_set is global_process_set:
        return ()
    if not isinstance(process_set, ProcessSet):
        raise UsageError(f"process_set must be a ProcessSet, got {process_set!r}")
    members = _registered(context, process_set)
    if session.rank not in members:
        raise UsageError(
            f"Rank {session.rank} is not a member of the provided process set of ranks {list(members)}; only its "
            "members may call the operation"
        )
    return members


def members_of(process_set: ProcessSet) -> Sequence[int]:
    """The ranks of a set that this rank is in. Raises UsageError as ``group_of`` does."""
    return group_of(process_set) or range(contexts.current().session.size)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a set, so that operations may use it. Every rank of the job calls it, in the set or not. Returns the set.

    One thread at a time calls it, in the same order on all ranks. Raises UsageError (a ValueError) for a duplicate or
    for ranks that do not exist, NotImplementedError for a set made of an MPI communicator, and MismatchError on every
    rank if ranks add different sets.
    """
    context = contexts.current()
    context.session  # noqa: B018  raises NotInitializedError
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.ranks is None:
        raise NotImplementedError(
            "a process set made of an MPI communicator can only be added by init(process_sets=[…]); afterwards, give "
            "its ranks"
        )
    ranks = _checked(context, process_set.ranks)
    if _id_of(context, ranks) is not None:
        raise UsageError(f"Attempted to add a duplicate process set: {process_set}")
    _agree(context, _ADD, [ranks])
    process_set.process_set_id = _register(context, ranks)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set. Every rank of the job calls it. True if the set was added; False also for the global set.

    One thread at a time calls it, in the same order on all ranks. Raises MismatchError on every rank if ranks remove
    different sets.
    """
    context = contexts.current()
    context.session  # noqa: B018  raises NotInitializedError
    identifier = process_set.process_set_id
    if identifier is None or identifier == 0:
        return False
    if context.process_sets.get(identifier) != tuple(process_set.ranks or ()):
        process_set.process_set_id = None
        return False
    _agree(context, _REMOVE, [context.process_sets[identifier]])
    process_set.process_set_id = None
    del context.process_sets[identifier]
    return True


def add_initial_sets(context: Context, process_sets: Sequence[ProcessSet]) -> None:
    """Add ``process_sets``, those that ``init`` is given. Every rank passes the same sets in the same order, except
    that it passes its own one of several sets made of communicators.

    Raises UsageError for a duplicate, and MismatchError on every rank if ranks pass different sets.
    """
    if not process_sets:
        return
    me = context.session.rank
    for process_set in process_sets:
        if process_set.mpi_comm is not None:
            process_set._ranks = sorted(process_set.mpi_comm.allgather(me))
    given = [_checked(context, process_set.ranks or ()) for process_set in process_sets]
    by_rank = _agree(context, _INIT, given, [process_set.mpi_comm is not None for process_set in process_sets])
    for index, (process_set, mine) in enumerate(zip(process_sets, given, strict=True)):
        if _id_of(context, mine) is not None:
            raise UsageError(
                f"byteps_py could not be initialized because process_sets entry number {index} is a duplicate: "
                f"{process_set}"
            )
        for ranks in dict.fromkeys(sets[index] for sets in by_rank):
            identifier = _register(context, ranks)
            if ranks == mine:
                process_set.process_set_id = identifier


def barrier_in_group(context: Context, group: tuple[int, ...]) -> None:
    """Return when every rank of ``group`` has called it: a gather of one byte. Raises as Session.wait does."""
    count = len(group)
    name = f"barrier[{hashlib.blake2b(repr(group).encode(), digest_size=8).hexdigest()}]"
    (slot,) = context.session.declare([TensorSpec(name, DType.UINT8, (1, count), Op.GATHER, group=group)])
    context.session.hand_over(slot, layout=Layout(((0, 1),), tuple((i, 1) for i in range(count))))
    context.session.wait(slot)


# ---- the sets of a context ---------------------------------------------------------------------------------


def _registered(context: Context, process_set: ProcessSet) -> tuple[int, ...]:
    size = context.session.size
    if process_set is global_process_set:
        return tuple(range(size))
    ranks = tuple(process_set.ranks or ())
    identifier = process_set.process_set_id
    if identifier is None or context.process_sets.get(identifier) != ranks:
        raise UsageError(
            f"Process set does not exist or has not been registered: {process_set}; give it to "
            "init(process_sets=[…]) or to add_process_set()"
        )
    return ranks


def _id_of(context: Context, ranks: tuple[int, ...]) -> int | None:
    if len(ranks) == context.session.size:
        return 0
    return next((identifier for identifier, known in context.process_sets.items() if known == ranks), None)


def _register(context: Context, ranks: tuple[int, ...]) -> int:
    context.process_sets_added += 1
    context.process_sets[context.process_sets_added] = ranks
    return context.process_sets_added


def _checked(context: Context, ranks: Sequence[int]) -> tuple[int, ...]:
    size = context.session.size
    if not ranks or len(set(ranks)) < len(ranks) or ranks[0] < 0 or ranks[-1] >= size:
        raise UsageError(f"a process set needs different ranks from 0 to {size - 1}, got {list(ranks)}")
    return tuple(ranks)


# ---- agreement ---------------------------------------------------------------------------------------------


def _agree(
    context: Context, kind: int, sets: Sequence[tuple[int, ...]], may_differ: Sequence[bool] = ()
) -> list[list[tuple[int, ...]]]:
    """Exchange ``sets`` with all ranks. Returns the sets by rank. Raises MismatchError if they differ.

    may_differ: for each set, whether ranks may differ in it. The exchange is a sum in which each rank fills its own
    row; these calls are rare.
    """
    session = context.session
    words = -(-session.size // _BITS)
    shape = (session.size, 1 + len(sets), words)
    request = TensorRequest(TensorSpec(_NAME, DType.INT64, shape), torch.int64, (shape,), torch.device("cpu"))
    table = torch.zeros(shape, dtype=torch.int64, device="cpu")
    table[session.rank, 0, 0] = kind
    for row, ranks in enumerate(sets, 1):
        for rank in ranks:
            table[session.rank, row, rank // _BITS] |= 1 << (rank % _BITS)
    (slot_view,) = context.slot_views([request])
    slot_view.contribute([table])
    slot_view.wait()
    slot_view.fetch([table])
    rows_by_rank = table.tolist()
    by_rank = [[_ranks_in(row) for row in rows[1:]] for rows in rows_by_rank]
    kinds = [rows[0][0] for rows in rows_by_rank]
    differing = [
        rank
        for rank, theirs in enumerate(by_rank)
        if kinds[rank] != kinds[0]
        or any(
            a != b for i, (a, b) in enumerate(zip(theirs, by_rank[0], strict=True)) if not any(may_differ[i : i + 1])
        )
    ]
    if differing:
        differences = "; ".join(
            f"rank {rank} {_VERBS.get(kinds[rank], '?')} {', '.join(str(list(s)) for s in by_rank[rank])}"
            for rank in (0, *differing[:5])
        )
        raise MismatchError(f"process sets differ between ranks: {differences}; make the same calls on every rank")
    return by_rank


_VERBS = {_ADD: "adds", _REMOVE: "removes", _INIT: "initializes"}


def _ranks_in(words: Sequence[int]) -> tuple[int, ...]:
    return tuple(word * _BITS + bit for word, value in enumerate(words) for bit in range(_BITS) if value >> bit & 1)


def ranks_of(process_set: ProcessSet) -> tuple[int, ...]:
    """The ranks of a set, () for all; this rank need not be in it. Raises UsageError for a set that is not added."""
    if isinstance(process_set, ProcessSet) and process_set.ranks and process_set.size() and not process_set.included():
        return tuple(process_set.ranks)
    return group_of(process_set)


def prefix_of(process_set: ProcessSet, kind: str) -> str:
    """The beginning of names of ``kind`` in a set. Numbered per set, because ranks outside it do not count along."""
    return kind if process_set is global_process_set else f"set{process_set.process_set_id}.{kind}"
