"""Process sets: static and added later, alike on all ranks, and what is said when they are not."""

from __future__ import annotations

import pytest
import torch
from support.threaded import ThreadedCluster

import byteps_py.torch as hvd
from byteps_py.config.settings import Settings
from byteps_py.session.solo import SoloSession
from byteps_py.torch.collectives.context import Context, current, use
from byteps_py.torch.operations.process_sets import group_of, members_of

SIZE = 3


class _Communicator:
    """What is used of an mpi4py communicator."""

    def __init__(self, ranks: list[int]) -> None:
        self._ranks = ranks

    def Get_rank(self) -> int:  # noqa: N802  mpi4py's name
        raise AssertionError("not needed")

    Get_size = Get_rank

    def allgather(self, value: int) -> list[int]:
        assert value in self._ranks
        return self._ranks


def test_the_global_set_and_sets_that_are_not_ranks() -> None:
    with use(Context(lambda settings: SoloSession())):
        assert hvd.global_process_set.ranks == []
        early = hvd.ProcessSet([0])
        assert (early.size(), early.rank(), early.process_set_id) == (None, None, None)
        with pytest.raises(ValueError, match="has not been initialized"):
            early.included()
        with pytest.raises(ValueError, match="has not been initialized"):
            hvd.add_process_set([0])
        with pytest.raises(ValueError, match="has not been initialized"):
            hvd.global_process_set.size()
        hvd.init(process_sets="dynamic", settings=Settings())
        assert group_of(hvd.global_process_set) == ()
        assert list(members_of(hvd.global_process_set)) == [0]
        assert (hvd.global_process_set.size(), hvd.global_process_set.rank()) == (1, 0)
        assert hvd.global_process_set.ranks == [0]
        assert hvd.global_process_set.included()
        assert not hvd.remove_process_set(hvd.global_process_set)
        assert not hvd.remove_process_set(early)
        with pytest.raises(ValueError, match="duplicate process set"):
            hvd.add_process_set([0])
        with pytest.raises(ValueError, match="not been registered"):
            group_of(early)
        for wrong in ([0.5], ["0"], 3, None):
            with pytest.raises(ValueError, match="list of process ranks or an mpi4py Comm"):
                hvd.ProcessSet(wrong)
        for ranks in ([], [1], [-1, 0], [0, 0]):
            with pytest.raises(ValueError, match="different ranks from 0 to 0"):
                hvd.add_process_set(ranks)
        with pytest.raises(NotImplementedError):
            hvd.add_process_set(hvd.ProcessSet(_Communicator([0])))
        hvd.shutdown()


def test_sets_added_and_removed_while_running() -> None:
    def main(rank: int):
        pair = hvd.add_process_set([2, 0])
        assert (pair.process_set_id, pair.ranks, pair.size()) == (1, [0, 2], 2)
        assert pair.included() == (rank != 1)
        if rank == 1:
            with pytest.raises(ValueError, match="Process is not part of provided process set"):
                pair.rank()
            with pytest.raises(ValueError, match="Rank 1 is not a member of the provided process set"):
                group_of(pair)
        else:
            assert pair.rank() == rank // 2
            assert group_of(pair) == (0, 2)
        with pytest.raises(ValueError, match="duplicate process set"):
            hvd.add_process_set(hvd.ProcessSet([0, 2]))
        with pytest.raises(ValueError, match="duplicate process set"):
            hvd.add_process_set(range(SIZE))
        with pytest.raises(hvd.MismatchError, match=r"rank 0 adds \[1\]; rank 2 adds \[1, 2\]"):
            hvd.add_process_set([1, 2] if rank == 2 else [1])
        with pytest.raises(hvd.MismatchError, match=r"rank 0 removes \[0, 2\]; rank 1 adds \[1\]; rank 2 adds \[1\]"):
            hvd.add_process_set([1]) if rank else hvd.remove_process_set(pair)
        one = hvd.add_process_set(hvd.ProcessSet([1]))
        assert one.process_set_id == 2
        assert hvd.remove_process_set(pair)
        assert not hvd.remove_process_set(pair)
        assert (pair.process_set_id, pair.size(), pair.rank()) == (None, None, None)
        assert str(pair) == "ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)"
        with pytest.raises(ValueError, match="not been registered"):
            group_of(pair)
        assert hvd.add_process_set(pair).process_set_id == 3
        hvd.shutdown()
        current().open(ThreadedCluster((1,)).settings_of(0))  # what was added belongs to the job that ended
        with pytest.raises(ValueError, match="does not exist or has not been registered"):
            pair.size()
        return str(one)

    assert ThreadedCluster((2, 1)).run(main)[0] == "ProcessSet(process_set_id=2, ranks=[1], mpi_comm=None)"


def test_sets_given_to_init() -> None:
    cluster = ThreadedCluster((2, 1))

    def main(rank: int):
        hvd.shutdown()
        pair, one = hvd.ProcessSet([1, 0]), hvd.ProcessSet([2])
        hvd.init(process_sets=[pair, one], settings=cluster.settings_of(rank))
        assert (pair.process_set_id, one.process_set_id) == (1, 2)
        assert pair.size() == 2
        assert hvd.add_process_set([0, 2]).process_set_id == 3
        hvd.init(process_sets=[pair])  # a no-op
        hvd.shutdown()
        with pytest.raises(ValueError, match="entry number 1 is a duplicate"):
            hvd.init(process_sets=[pair, hvd.ProcessSet([0, 1])], settings=cluster.settings_of(rank))
        assert not hvd.is_initialized()
        with pytest.raises(hvd.MismatchError, match=r"rank 0 initializes \[0\]; rank 1 initializes \[1\]"):
            hvd.init(process_sets=[hvd.ProcessSet([rank])], settings=cluster.settings_of(rank))
        halves = hvd.ProcessSet(_Communicator([2] if rank == 2 else [0, 1]))
        assert halves.included() is None
        hvd.init(process_sets=[halves], settings=cluster.settings_of(rank))
        return halves.process_set_id, halves.ranks, halves.rank()

    assert cluster.run(main) == [(1, [0, 1], 0), (1, [0, 1], 1), (2, [2], 0)]


def test_many_ranks_fit_in_the_agreement() -> None:
    from byteps_py.torch.operations.process_sets import _ranks_in

    assert _ranks_in([1 << 61, 3]) == (61, 62, 63)
    assert torch.iinfo(torch.int64).max > 1 << 62
