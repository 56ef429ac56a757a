"""Sparse gradients: gathered by rows, whatever the ranks' gradients look like, and beside dense ones."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.threaded import ThreadedCluster
from torch import nn
from torch_training import assert_same, state_of, wrap

import byteps_py.torch as bps
from byteps_py.errors import MismatchError
from byteps_py.torch.gradients.sparse_bucket import SparseBucket

MACHINES = (2, 1)
ROWS, WIDTH = 12, 3


class Text(nn.Module):
    """Two tables, of which odd ranks leave one out in even steps, and a dense layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.places = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.out = nn.Linear(WIDTH, 2)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, words: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        hidden = self.words(words)
        if places is not None:
            hidden = hidden + self.places(places)
        return self.out(hidden.tanh())


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    words, places = torch.randint(0, ROWS, (2, 4 + rank), generator=generator)
    return model(words, None if rank % 2 and step % 2 == 0 else places).square().sum()


def train(sparse: bool, steps: int = 4, zero=True, passes: int = 1, **options):
    def main(rank: int):
        model = Text(sparse)
        optimizer = wrap(
            model,
            lambda params: torch.optim.SGD(params, lr=0.1),
            backward_passes_per_step=passes,
            **options,
        )
        for step in range(steps):
            for batch in range(passes):
                loss_of(model, rank, step * passes + batch).backward()
            optimizer.step()
            assert (model.words.weight.grad.layout is torch.sparse_coo) == sparse
            optimizer.zero_grad(set_to_none=zero)
        kinds = [isinstance(bucket, SparseBucket) for bucket in optimizer._stepper.reducer.buckets]
        return state_of(model), kinds

    return main


def compare(machines=MACHINES, atol=1e-6, cluster=None, **options) -> None:
    """Against the same training with dense gradients."""
    found = (cluster or ThreadedCluster(machines)).run(train(True, **options))
    expected = ThreadedCluster(machines).run(train(False, **options))
    assert_same([state for state, _ in found], found[0][0])
    assert [kinds for _, kinds in found] == [found[0][1]] * sum(machines)
    assert sum(found[0][1]) == 2
    for name, value in expected[0][0].items():
        torch.testing.assert_close(found[0][0][name], value, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("fusion_bytes", [0, 1 << 20])
def test_like_dense_gradients(zero, fusion_bytes) -> None:
    compare(cluster=ThreadedCluster(MACHINES, fusion_bytes=fusion_bytes), zero=zero)


@pytest.mark.parametrize(
    "options",
    [
        {"passes": 2},
        {"op": bps.Sum},
        {"gradient_predivide_factor": 2.0},
        {"groups": 1},
    ],
    ids=str,
)
def test_with_options(options) -> None:
    compare(**options)


def test_compression() -> None:
    compare(compression=bps.Compression.fp16, atol=2e-3)


def test_only_rows_travel() -> None:
    cluster = ThreadedCluster((1, 1))
    sizes: dict[str, int] = {}
    contribute = cluster.contribute

    def measure(rank, slot, data, *rest):
        sizes[slot.spec.name] = max(sizes.get(slot.spec.name, 0), len(data))
        return contribute(rank, slot, data, *rest)

    cluster.contribute = measure

    def main(rank: int):
        model = nn.Embedding(100_000, 8, sparse=True)
        optimizer = wrap(model)
        for _ in range(3):
            model(torch.tensor([rank, 7])).sum().backward()
            optimizer.synchronize()
            grad = model.weight.grad
            optimizer.zero_grad()
        assert grad.is_coalesced()
        assert grad.indices().tolist() == [[0, 1, 7]]
        return grad.values()[:, 0].tolist()

    assert cluster.run(main) == [[0.5, 0.5, 1.0]] * 2
    assert max(sizes.values()) <= 4096


def test_gradients_of_every_kind() -> None:
    """In turn: one rank has none, one a dense one, none has any, all are dense again."""

    def main(rank: int):
        table = nn.Parameter(torch.zeros(4, 2))
        other = nn.Parameter(torch.zeros(1))
        optimizer = bps.DistributedOptimizer(torch.optim.SGD([table, other], lr=1.0), [("t", table), ("o", other)])
        x = torch.tensor([1, 3])

        def sparse():
            nn.functional.embedding(x, table, sparse=True).sum().backward()

        def dense():
            (table * torch.tensor([[1.0], [0], [0], [2]])).sum().backward()

        def none():
            (other * 2).sum().backward()

        history = []
        for step in ([sparse, none], [sparse, dense], [none, none], [dense, dense]):
            step[rank]()
            optimizer.synchronize()
            history.append((table.grad.to_dense()[:, 0].tolist(), other.grad.tolist()))
            optimizer.zero_grad()
        return history

    expected = [
        ([0.0, 0.5, 0.0, 0.5], [1.0]),
        ([0.5, 0.5, 0.0, 1.5], [0.0]),
        ([0.0, 0.0, 0.0, 0.0], [2.0]),
        ([1.0, 0.0, 0.0, 2.0], [0.0]),
    ]
    assert ThreadedCluster((1, 1)).run(main) == [expected] * 2


def test_a_dense_gradient_that_becomes_sparse() -> None:
    def main(rank: int):
        model = nn.Embedding(5, 2)
        optimizer = wrap(model)
        found = []
        for sparse in (False, True, True, False):
            model.sparse = sparse
            model(torch.tensor([rank])).sum().backward()
            optimizer.synchronize()
            found.append(model.weight.grad.to_dense()[:2, 0].tolist())
            optimizer.zero_grad()
        return found

    assert ThreadedCluster((1, 1)).run(main) == [[[0.5, 0.5]] * 4] * 2


@pytest.mark.parametrize("sparse_as_dense", [False, True])  # it takes no dense ones
def test_optimizers_for_sparse_gradients(sparse_as_dense) -> None:
    def main(rank: int):
        model = nn.Embedding(6, 2, sparse=True)
        nn.init.ones_(model.weight)
        optimizer = wrap(model, lambda params: torch.optim.SparseAdam(params, lr=0.1), sparse_as_dense=sparse_as_dense)
        for _ in range(2):
            model(torch.tensor([rank, 3])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight[:, 0].lt(1).tolist()

    assert ThreadedCluster((1, 1)).run(main) == [[True, True, False, True, False, False]] * 2


def test_data_parallel_modules_too() -> None:
    def main(rank: int):
        model = bps.DistributedDataParallel(nn.Embedding(4, 1, sparse=True))
        model(torch.tensor([rank])).sum().backward()
        return model.module.weight.grad.to_dense().flatten().tolist()

    assert ThreadedCluster((1, 1)).run(main) == [[0.5, 0.5, 0.0, 0.0]] * 2


def test_a_process_set() -> None:
    def main(rank: int):
        pair = bps.add_process_set([0, 2])
        model = nn.Embedding(4, 2, sparse=True)
        optimizer = wrap(model, process_set=pair)
        model(torch.tensor([rank])).sum().backward()
        optimizer.synchronize()
        return model.weight.grad.to_dense()[:, 0].tolist()

    assert ThreadedCluster(MACHINES).run(main) == [[0.5, 0, 0.5, 0], [0, 1, 0, 0], [0.5, 0, 0.5, 0]]


def test_what_is_refused() -> None:
    def main(rank: int) -> None:
        model = nn.Embedding(4, 2, sparse=True)
        optimizer = wrap(model, op=bps.Max)
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(ValueError, match=r"'weight' is sparse, which op=Max can't combine; use Sum or Average"):
            optimizer.synchronize()

        model = nn.Embedding(4, 2, sparse=True)
        optimizer = wrap(model)
        crossing = bps.CrossBarrier(model, wrap(model))
        with pytest.raises(ValueError, match="'weight' is sparse"):
            model(torch.tensor([1])).sum().backward()
        del crossing
        model = nn.Embedding(4, 2, sparse=True)
        optimizer = wrap(model)
        model(torch.tensor([1])).sum().backward()
        optimizer.synchronize()
        with pytest.raises(ValueError, match="CrossBarrier can't overlap sparse gradients"):
            bps.CrossBarrier(model, optimizer)

    ThreadedCluster((1, 1)).run(main)


def test_a_mismatch_of_dense_gradients_is_still_told() -> None:
    def main(rank: int) -> None:
        model = nn.Linear(2, 2 + rank)
        optimizer = wrap(model)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(bps.MismatchError, match=r"Gradient.weight\+1 .*rank 0 gave .*rank 1 gave"):
            optimizer.step()

    ThreadedCluster((1, 1)).run(main)


def test_indices_outside_of_the_table_are_an_error_and_nothing_is_written() -> None:
    """torch does not check them, and the rank with the larger table does not see an error of its own."""

    def main(rank: int):
        model = nn.Embedding(8 - 4 * rank, WIDTH, sparse=True)
        optimizer = wrap(model)
        model(torch.tensor([7 - 4 * rank])).sum().backward()
        if rank == 0:
            optimizer.synchronize()
            return
        with pytest.raises(MismatchError, match="rank 0 has index 7 in dimension 0 of a shape \\[4, 3\\]"):
            optimizer.synchronize()

    ThreadedCluster((1, 1)).run(main)


# ---- rows that owners add (collectives/row_owners.py): the bits of a gather, with fewer bytes between machines


def rows_of(rank: int, step: int, table: int, dims: int, dtype: torch.dtype) -> torch.Tensor | None:
    """A gradient with rows of which many ranks have the same. Rank 1 has none in the first step."""
    if rank == 1 and step == 0:
        return None
    generator = torch.Generator().manual_seed(100 * step + rank)
    few = (torch.rand(6000, generator=generator) ** 4 * table).long()
    at = few[None] if dims == 1 else torch.stack([few // 100, few % 100])
    values = torch.randn(6000, 32, generator=generator).to(dtype)
    shape = (table, 32) if dims == 1 else (table // 100, 100, 32)
    return torch.sparse_coo_tensor(at, values, shape, check_invariants=False)


def added_in_rank_order(gradients, after, members, dtype) -> torch.Tensor:
    """What ``after`` makes of each row's sum."""
    given = [each.coalesce() for each in gradients if each is not None]
    exact = torch.float32 if given[0].dtype in (torch.float16, torch.bfloat16) else given[0].dtype
    total = torch.zeros(given[0].shape, dtype=exact)
    for each in given:
        total[tuple(each.indices())] += each.values().to(exact)
    return after(total, members).to(dtype)


def mean_of(sums: torch.Tensor, members: int) -> torch.Tensor:
    return sums / members


def given_by_owners(cluster: ThreadedCluster) -> int:
    return sum(name.endswith(".sums") for name, _ in cluster.rounds)


@pytest.mark.parametrize("machines", [(1, 1, 1, 1), (2, 1, 3), (3, 3), (4,)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "dims", "options", "after"),
    [
        (torch.float32, 1, {}, mean_of),
        (torch.float32, 2, {"op": bps.Sum}, lambda sums, _: sums),
        (torch.bfloat16, 1, {}, mean_of),
        (torch.float64, 1, {"gradient_predivide_factor": 2.0}, lambda sums, n: sums * (2.0 / n)),
    ],
    ids=["mean", "sum of two dimensions", "bfloat16", "predivided"],
)
def test_owners_add_rows_in_rank_order(machines, dtype, dims, options, after) -> None:
    def main(rank: int):
        param = nn.Parameter(torch.zeros((5000, 32) if dims == 1 else (50, 100, 32), dtype=dtype))
        optimizer = bps.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("table", param)], **options)
        found = []
        for step in range(2):
            param.grad = rows_of(rank, step, 5000, dims, dtype)
            optimizer.synchronize()
            assert param.grad.is_coalesced()
            found.append(param.grad.to_dense())
        return found

    cluster = ThreadedCluster(machines)
    results = cluster.run(main)
    for step in range(2):
        gradients = [rows_of(rank, step, 5000, dims, dtype) for rank in range(sum(machines))]
        if "gradient_predivide_factor" in options:
            gradients = [None if each is None else each.coalesce() / 2.0 for each in gradients]
        expected = added_in_rank_order(gradients, after, sum(machines), dtype)
        assert all(torch.equal(found[step], expected) for found in results)
    assert given_by_owners(cluster) == (0 if len(machines) == 1 else 2)


def test_owners_of_a_process_set_and_compressed_rows() -> None:
    def main(rank: int):
        some = bps.add_process_set([0, 1, 3, 4, 5, 6, 7])
        param = nn.Parameter(torch.zeros(5000, 32))
        optimizer = bps.DistributedOptimizer(
            torch.optim.SGD([param], lr=1.0),
            [("table", param)],
            process_set=some,
            compression=bps.Compression.bf16,
        )
        param.grad = rows_of(rank, 1, 5000, 1, torch.float32)
        optimizer.synchronize()
        return param.grad.to_dense()

    cluster = ThreadedCluster((1,) * 8)
    results = cluster.run(main)
    given = [rows_of(rank, 1, 5000, 1, torch.float32).coalesce().bfloat16() for rank in (0, 1, 3, 4, 5, 6, 7)]
    expected = added_in_rank_order(given, mean_of, 7, torch.float32)
    assert all(torch.equal(results[rank], expected) for rank in (0, 1, 3, 4, 5, 6, 7))
    assert given_by_owners(cluster) == 1


def test_rows_that_ranks_do_not_share_are_gathered() -> None:
    def main(rank: int):
        param = nn.Parameter(torch.zeros(20_000, 32))
        optimizer = bps.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("table", param)])
        at = torch.arange(rank, 20_000, 4)
        param.grad = torch.sparse_coo_tensor(
            at[None], torch.full((5000, 32), rank + 1.0), param.shape, check_invariants=False
        )
        optimizer.synchronize()
        return param.grad.to_dense()

    cluster = ThreadedCluster((1, 1, 1, 1))
    expected = (torch.arange(20_000) % 4 + 1.0)[:, None].expand(-1, 32) / 4
    assert all(torch.equal(found, expected) for found in cluster.run(main))
    assert not given_by_owners(cluster)
    assert [name for name, _ in cluster.rounds if "numbers" in name]  # they have looked


def test_owners_name_the_ranks_whose_rows_are_not_finite() -> None:
    def main(rank: int):
        param = nn.Parameter(torch.zeros(5000, 32))
        optimizer = bps.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("table", param)])
        found = []
        for step in range(2):
            param.grad = rows_of(rank, step + 1, 5000, 1, torch.float32).coalesce()
            if step == 0 and rank == 2:
                param.grad.values()[5, 3] = torch.nan
            if step == 1 and rank:
                param.grad.values()[0] = 3e38
            with pytest.raises(bps.NonFiniteError) as caught:
                optimizer.synchronize()
            found.append(str(caught.value))
        return found

    cluster = ThreadedCluster((1, 2, 1), nonfinite="raise")
    for nan, overflow in cluster.run(main):
        assert "rank 2" in nan
        assert "rank 1" not in nan
        assert "no rank alone" in overflow
    assert given_by_owners(cluster) == 2


def test_ranks_with_different_tables_gather_as_they_are() -> None:
    """And the rank with the smaller table finds out."""

    def main(rank: int):
        param = nn.Parameter(torch.zeros(5000 - 1000 * rank, 32))
        optimizer = bps.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("table", param)])
        param.grad = rows_of(0, 1, len(param), 1, torch.float32)
        with pytest.raises(MismatchError, match="table") if rank else contextlib.nullcontext():
            optimizer.synchronize()

    ThreadedCluster((1, 1, 1)).run(main)
