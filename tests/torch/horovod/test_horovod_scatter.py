"""reducescatter in its forms: the rows of the reduction that fall to each rank."""

from __future__ import annotations

import pytest
import torch
from support.threaded import ThreadedCluster, contract
from torch_values import values

import byteps_py.torch as hvd
from byteps_py.config.settings import Settings
from byteps_py.session.solo import SoloSession
from byteps_py.torch.collectives.context import Context, use
from byteps_py.torch.collectives.dtypes import WIRE

CLUSTERS = [(2,), (4,), (2, 2)]


def rows_of(whole: torch.Tensor, position: int, members: int) -> torch.Tensor:
    count, more = divmod(whole.shape[0], members)
    start = position * count + min(position, more)
    return whole[start : start + count + (position < more)]


@pytest.mark.parametrize("machines", CLUSTERS, ids=str)
def test_every_form(machines) -> None:
    size = sum(machines)
    shapes = [(8,), (7, 3), (3, 2, 2), (0, 5), (size, 0)]

    def main(rank: int):
        found = []
        for dtype in WIRE:
            xs = [values(rank, dtype, shape) for shape in shapes]
            mean = [hvd.reducescatter(x) for x in xs]
            total = [hvd.synchronize(hvd.reducescatter_async(x, f"{x.dim()}", hvd.Sum)) for x in xs[:3]]
            group = hvd.grouped_reducescatter(xs, "g")
            assert isinstance(group, list)
            handle = hvd.grouped_reducescatter_async(xs, op=hvd.Sum)
            again = hvd.synchronize(handle)
            assert isinstance(again, tuple)
            found.append((mean, total, group, again))
        return found

    for rank, by_dtype in enumerate(ThreadedCluster(machines).run(main)):
        for dtype, (mean, total, group, again) in zip(WIRE, by_dtype, strict=True):
            for i, shape in enumerate(shapes):
                parts = [values(r, dtype, shape) for r in range(size)]
                average = rows_of(contract(parts, machines, average=True, rounding="trunc"), rank, size)
                summed = rows_of(contract(parts, machines), rank, size)
                assert torch.equal(mean[i], average)
                assert torch.equal(group[i], average)
                assert torch.equal(again[i], summed)
                assert i >= len(total) or torch.equal(total[i], summed)


def test_factors_compression_and_process_sets() -> None:
    def main(rank: int):
        pair = hvd.add_process_set([0, 2])
        x = values(rank, torch.float32, (5, 2))
        halves = hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
        small = hvd.reducescatter(x, compression=hvd.Compression.fp16)
        inside = hvd.reducescatter(x, process_set=pair) if rank != 1 else None
        return halves, small, inside

    parts = [values(rank, torch.float32, (5, 2)) for rank in range(3)]
    for rank, (halves, small, inside) in enumerate(ThreadedCluster((2, 1)).run(main)):
        assert torch.equal(halves, rows_of(contract([p * 0.5 for p in parts], (2, 1)) * 3.0, rank, 3))
        mean = contract([p.half() for p in parts], (2, 1), average=True).float()
        assert torch.equal(small, rows_of(mean, rank, 3))
        if inside is not None:
            whole = contract([parts[0], parts[2]], (1, 1), average=True)
            assert torch.equal(inside, rows_of(whole, rank // 2, 2))


@pytest.mark.parametrize("named", [True, False])
def test_gradients(named) -> None:
    def main(rank: int):
        x = torch.ones(3, 2, requires_grad=True)
        y = hvd.reducescatter(x, "y" if named else None, op=hvd.Sum)
        (y * (rank + 1)).sum().backward()
        z, w = hvd.grouped_reducescatter([x, x * 2], "z" if named else None, prescale_factor=2.0)
        (z + w).sum().backward()
        return x.grad[:, 0].tolist()

    # y: gathered and, as a sum, times 2; z and w: gathered, times 2 and times 4
    assert ThreadedCluster((1, 1)).run(main) == [[2.0 + 6, 2.0 + 6, 4.0 + 6]] * 2


def test_alone_and_misused() -> None:
    with use(Context(lambda settings: SoloSession())):
        hvd.init(settings=Settings())
        x = torch.rand(5, 2)
        assert torch.equal(hvd.reducescatter(x), x)
        assert torch.equal(hvd.grouped_reducescatter([x, x], op=hvd.Sum)[1], x)
        for op in (hvd.Max, hvd.Adasum, "sum"):
            for error in (ValueError, RuntimeError, hvd.UnsupportedError):
                with pytest.raises(error, match="op=Average or op=Sum"):
                    hvd.reducescatter(x, op=op)
        for error in (ValueError, RuntimeError):
            with pytest.raises(error, match="no first dimension"):
                hvd.grouped_reducescatter([x, torch.tensor(1.0)])
        with pytest.raises(ValueError, match="list of tensors"):
            hvd.grouped_reducescatter(x)
        with pytest.raises(ValueError, match="bool"):
            hvd.reducescatter(torch.tensor([True]))
        hvd.shutdown()
