"""Adasum against its definition, applied to whole vectors in float64."""

from __future__ import annotations

import pytest
import torch
from support.threaded import ThreadedCluster
from torch_values import values

import byteps_py.torch as bps
from byteps_py.torch.collectives.context import current
from byteps_py.torch.operations.adasum import adasum, start

SHAPES = ((5, 7), (1,), (3, 1, 11), (0, 2), (), (40000,))


def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    common = (a * b).sum()
    factors = [1 - common / (2 * square) if square else 1.0 for square in (a.square().sum(), b.square().sum())]
    return factors[0] * a + factors[1] * b


def definition(parts: list[torch.Tensor]) -> torch.Tensor:
    level = [part.double() for part in parts]
    while len(level) > 1:
        merged = [pair(a, b) for a, b in zip(level[0::2], level[1::2], strict=False)]
        level = merged + level[len(level) - len(level) % 2 :]
    return level[0]


def run(machines, tensors_of, name="x", group=()):
    def main(rank: int):
        if group and rank not in group:
            return None
        return adasum(current(), tensors_of(rank), name, group)

    return ThreadedCluster(machines).run(main)


@pytest.mark.parametrize("machines", [(1, 1), (3,), (2, 2), (3, 2), (1, 1, 1, 1, 1, 1, 1), (8,)], ids=str)
def test_like_its_definition(machines) -> None:
    def tensors_of(rank: int):
        return [values(100 * rank + i, torch.float32, shape) + 1 for i, shape in enumerate(SHAPES)]

    results = run(machines, tensors_of)
    parts = [tensors_of(rank) for rank in range(sum(machines))]
    for i, shape in enumerate(SHAPES):
        expected = definition([part[i] for part in parts])
        assert results[0][i].shape == shape
        torch.testing.assert_close(results[0][i], expected.float(), rtol=2e-7, atol=1e-6)
        assert all(torch.equal(result[i], results[0][i]) for result in results)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str
)
def test_dtypes_are_rounded_once(dtype, tolerance) -> None:
    results = run((2, 1), lambda rank: [values(rank, dtype)])
    expected = definition([values(rank, dtype) for rank in range(3)])
    assert results[0][0].dtype == dtype
    torch.testing.assert_close(results[0][0].double(), expected, rtol=tolerance, atol=tolerance / 10)


def test_equal_vectors_are_averaged_and_orthogonal_ones_added_exactly() -> None:
    same = values(0, torch.float32)

    def tensors_of(rank: int):
        alone = torch.zeros(4)
        alone[rank] = 0.1 * (rank + 1)
        return [same, alone, torch.zeros(3)]

    for equal, orthogonal, zero in run((2, 2), tensors_of):
        assert torch.equal(equal, same)
        assert torch.equal(orthogonal, torch.tensor([0.1 * (rank + 1) for rank in range(4)]))
        assert torch.equal(zero, torch.zeros(3))


def test_vectors_that_vanish() -> None:
    """Zeros on a rank, opposite vectors, tiny and huge ones, and what is not finite."""
    x = values(7, torch.float32)

    def tensors_of(rank: int):
        infinite = torch.full((2,), float("inf") if rank == 1 else 1.0)
        return [x if rank == 3 else torch.zeros_like(x), x * (-1) ** rank, x * 1e-25, infinite]

    for alone, opposite, tiny, infinite in run((2, 2), tensors_of):
        assert torch.equal(alone, x)
        assert torch.equal(opposite, torch.zeros_like(x))
        torch.testing.assert_close(tiny, x * 1e-25, rtol=1e-6, atol=0)
        assert not torch.isfinite(infinite).any()


def test_some_ranks_only() -> None:
    results = run((2, 2), lambda rank: [values(rank, torch.float32)], group=(0, 2, 3))
    expected = definition([values(rank, torch.float32) for rank in (0, 2, 3)]).float()
    assert results[1] is None
    torch.testing.assert_close(results[3][0], expected, rtol=2e-7, atol=1e-6)
    assert torch.equal(results[0][0], results[3][0])


def test_a_rank_alone() -> None:
    ((result,),) = run((1,), lambda rank: [values(1, torch.float32)])
    assert torch.equal(result, values(1, torch.float32))


def test_operations_may_be_waited_for_in_any_order_and_their_tensors_changed() -> None:
    names = [f"x{i}" for i in range(4)]

    def main(rank: int):
        tensors = [values(rank + 10 * i, torch.float32) for i in range(4)]
        running = {name: start(current(), [t], name) for name, t in zip(names, tensors, strict=True)}
        for tensor in tensors:
            tensor.zero_()
        order = names if rank % 2 else names[::-1]
        found = {name: running[name].wait()[0] for name in order}
        assert all(operation.done for operation in running.values())
        return [found[name] for name in names]

    for result in ThreadedCluster((2, 1)).run(main):
        for i in range(4):
            expected = definition([values(rank + 10 * i, torch.float32) for rank in range(3)]).float()
            torch.testing.assert_close(result[i], expected, rtol=2e-7, atol=1e-6)


def test_a_name_is_used_again_with_other_shapes() -> None:
    def main(rank: int):
        return [adasum(current(), [torch.ones(n)], "x")[0] for n in (3, 50, 2)]

    for results in ThreadedCluster((1, 1)).run(main):
        assert [torch.equal(result, torch.ones(n)) for result, n in zip(results, (3, 50, 2), strict=True)] == [True] * 3


def test_misuse_and_failures() -> None:
    cluster = ThreadedCluster((1, 1))

    def main(rank: int) -> None:
        with pytest.raises(ValueError, match="Adasum takes floating types"):
            adasum(current(), [torch.ones(2, dtype=torch.int32)], "x")
        with pytest.raises(ValueError, match="of one dtype"):
            adasum(current(), [torch.ones(2), torch.ones(2).double()], "x")
        if rank == 0:
            operation = start(current(), [torch.ones(2)], "x")
            with pytest.raises(ValueError, match="duplicate name: Adasum of 'x' is in flight"):
                start(current(), [torch.ones(2)], "x")
            assert not operation.done
            cluster.fail(bps.PeerLostError("rank 1 is gone"))
            with pytest.raises(bps.PeerLostError, match="rank 1 is gone"):
                operation.wait()

    cluster.run(main)
