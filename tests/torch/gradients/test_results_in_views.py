"""Results into tensors that can't hold them are refused before anything travels; as inputs they are like any other."""

from __future__ import annotations

import pytest
import torch
from support.threaded import ThreadedCluster

import byteps_py.torch as hvd
from byteps_py.torch.collectives.dtypes import check_result

IN_PLACE = {
    "allreduce_": lambda x: hvd.allreduce_(x, name="x"),
    "adasum": lambda x: hvd.allreduce_(x, name="x", op=hvd.Adasum),
    "allreduce_async_": lambda x: hvd.allreduce_async_(x),
    "grouped_allreduce_": lambda x: hvd.grouped_allreduce_([torch.ones(2), x], name="x"),
    "push_pull_inplace": lambda x: hvd.push_pull_inplace(x, name="x"),
    "byteps_push_pull": lambda x: hvd.byteps_push_pull(x, name="x"),
    "broadcast_": lambda x: hvd.broadcast_(x, 0, name="x"),
    "broadcast_parameters": lambda x: hvd.broadcast_parameters({"a": torch.ones(2), "x": x}, 0),
}


def expanded() -> torch.Tensor:
    return torch.arange(3.0).expand(4, 3)


def overlapping() -> torch.Tensor:
    return torch.arange(6.0).as_strided((3, 3), (1, 1))


def negated() -> torch.Tensor:
    return torch._neg_view(torch.arange(3.0))


@pytest.mark.parametrize("make", [expanded, overlapping, negated])
@pytest.mark.parametrize("operation", IN_PLACE.values(), ids=IN_PLACE)
def test_refused_before_the_sum(make, operation) -> None:
    cluster = ThreadedCluster((1, 1))

    def main(rank: int) -> None:
        x = make()
        with pytest.raises(hvd.UsageError, match=r"negated view|several elements at one address"):
            operation(x)
        assert torch.equal(x, make())

    cluster.run(main)
    assert not cluster.rounds
    assert not cluster.waiting


def test_conjugated_views() -> None:
    def main(rank: int) -> None:
        x = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
        with pytest.raises(hvd.UsageError, match="conjugated view"):
            hvd.broadcast_(x.conj(), 0)
        assert torch.equal(hvd.broadcast(x.conj(), 1), (x * 2 / (rank + 1)).conj().resolve_conj())
        assert torch.equal(hvd.allgather(x.conj())[2 * rank : 2 * rank + 2], x.conj().resolve_conj())

    ThreadedCluster((1, 1)).run(main)


@pytest.mark.parametrize("make", [expanded, overlapping, negated])
def test_as_inputs_they_are_like_any_other(make) -> None:
    def main(rank: int) -> None:
        x, plain = make(), make().resolve_neg().clone()
        assert torch.equal(hvd.allreduce(x), plain)
        assert torch.equal(hvd.push_pull(x, average=False), plain * 2)
        assert torch.equal(hvd.broadcast(x, 0), plain)
        assert torch.equal(hvd.allgather(x)[: len(plain)], plain)

    ThreadedCluster((1, 1)).run(main)


def test_only_what_overlaps_is_refused() -> None:
    base = torch.arange(64.0)
    for good in (
        base.view(8, 8).t(),
        base.view(4, 4, 4)[:, ::2, 1:3],
        base.as_strided((2, 2), (3, 2)),
        base.as_strided((4, 2), (2, 3)),  # in each other's gaps
        base[:1].expand(1, 1),
        torch.empty(0, 3).t(),
        base.view(1, 2, 4, 8).to(memory_format=torch.channels_last),
    ):
        check_result(good, None)
    for bad in (base.as_strided((4, 3), (2, 2)), base.as_strided((2, 2), (1, 1)), base[:1].expand(2)):
        with pytest.raises(hvd.UsageError, match="at one address"):
            check_result(bad, "x")
