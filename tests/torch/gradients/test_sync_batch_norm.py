"""SyncBatchNorm on several ranks against torch's BatchNorm on their batches put together."""

from __future__ import annotations

import copy

import pytest
import torch
from support.threaded import ThreadedCluster
from torch import nn

import byteps_py.torch as bps

CHANNELS = 3


def batches(sizes, dtype=torch.float32, shape=(4, 2), offset=0.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(n, CHANNELS, *shape, generator=generator, dtype=torch.float64) * 2 + offset).to(dtype)
        for n in sizes
    ]


def with_parameters(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        for seed, param in enumerate(layer.parameters()):
            param.copy_(torch.rand(CHANNELS, generator=torch.Generator().manual_seed(seed)) + 0.5)
    return layer


def passes(layer: nn.Module, inputs: list[torch.Tensor], weigh) -> dict[str, torch.Tensor]:
    """Two forward and backward passes; the second's results and the state."""
    for x in inputs:
        x = x.clone().requires_grad_()
        layer.zero_grad()
        y = layer(x)
        weigh(y).backward()
    found = {"y": y.detach(), "dx": x.grad}
    found |= {f"d{name}": param.grad for name, param in layer.named_parameters()}
    return found | {name: buffer.clone() for name, buffer in layer.named_buffers()}


def weighed(y: torch.Tensor) -> torch.Tensor:
    return (y.double() * y.double().sigmoid()).sum()


def compare(sizes, options, dtype=torch.float32, shape=(4, 2), offset=0.0, tolerance=1e-5) -> None:
    parts = [batches(sizes, dtype, shape, offset), batches(sizes, dtype, shape, -offset)]
    joint = nn.BatchNorm2d if len(shape) == 2 else nn.BatchNorm1d
    layer_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    alone = with_parameters(joint(CHANNELS, **options).to(torch.float64))
    expected = passes(alone, [torch.cat(part).double() for part in parts], weighed)

    def main(rank: int):
        layer = with_parameters(bps.SyncBatchNorm(CHANNELS, **options).to(layer_dtype))
        return passes(layer, [part[rank] for part in parts], weighed)

    results = ThreadedCluster([len(sizes) - 1, 1]).run(main)
    for name in expected:
        shared = name.startswith(("running", "num"))
        if name in ("y", "dx"):
            found = torch.cat([result[name] for result in results])
            assert found.dtype == dtype
        elif shared:
            found = results[0][name]
            assert all(torch.equal(result[name], found) for result in results)
        else:
            found = sum(result[name] for result in results)
        scale = max(1.0, float(expected[name].abs().max()))
        torch.testing.assert_close(found.double(), expected[name].double(), rtol=0, atol=tolerance * scale, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.3, "eps": 0.1},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
def test_like_a_joint_batch(options) -> None:
    compare([5, 2, 3], options)


@pytest.mark.parametrize("shape", [(), (7,), (4, 2)], ids=str)
def test_shapes(shape) -> None:
    compare([4, 4], {}, shape=shape)


@pytest.mark.parametrize("sizes", [[1, 1], [3, 0, 2], [0, 2], [1, 7, 1]], ids=str)
def test_uneven_and_empty_batches(sizes) -> None:
    compare(sizes, {})


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)], ids=str
)
def test_dtypes(dtype, tolerance) -> None:
    compare([3, 4], {}, dtype, tolerance=tolerance)


def test_a_variance_that_is_small_beside_the_mean() -> None:
    compare([6, 3], {"momentum": 1.0}, offset=3000.0, tolerance=2e-3)


def test_eval_exchanges_nothing_and_uses_the_running_statistics() -> None:
    cluster = ThreadedCluster((1, 1))

    def main(rank: int):
        layer = with_parameters(bps.SyncBatchNorm(CHANNELS))
        layer(batches([3, 5])[rank])
        rounds = len(cluster.rounds)
        x = batches([4])[0]
        if rank == 0:  # alone
            reference = nn.BatchNorm2d(CHANNELS).eval()
            reference.load_state_dict(layer.state_dict())
            assert torch.equal(layer.eval()(x), reference(x))
            assert len(cluster.rounds) == rounds

    cluster.run(main)
    assert len(cluster.rounds) == 1


def test_conversion_keeps_parameters_buffers_and_training() -> None:
    def main(rank: int):
        plain = nn.Sequential(nn.Conv2d(CHANNELS, 4, 1), nn.Sequential(nn.BatchNorm2d(4, eps=0.5), nn.ReLU()))
        norm = plain[1][0]
        converted = bps.SyncBatchNorm.convert_sync_batchnorm(plain)
        assert converted[1][0].weight is norm.weight
        assert converted[1][0].running_mean is norm.running_mean
        assert converted[1][0].eps == 0.5
        assert bps.SyncBatchNorm.convert_sync_batchnorm(converted)[1][0] is converted[1][0]
        bps.broadcast_parameters(converted.state_dict(), 0)
        optimizer = bps.DistributedOptimizer(
            torch.optim.SGD(converted.parameters(), lr=0.1), converted.named_parameters()
        )
        for step in range(2):
            converted(batches([2, 3])[rank] + step).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in converted.state_dict().items()}

    first, second = ThreadedCluster((2,)).run(main)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_misuse() -> None:
    def main(rank: int) -> None:
        layer = bps.SyncBatchNorm(CHANNELS)
        with pytest.raises(ValueError, match=r"at least 2D input \(got 1D input\)"):
            layer(torch.ones(3))
        with pytest.raises(ValueError, match="the layer has 3 channels, the input 2"):
            layer(torch.ones(3, 2))
        with pytest.raises(ValueError, match="more than 1 value per channel when training, got 1 on all ranks"):
            layer(torch.ones(1 - rank, CHANNELS))
        layer(torch.ones(2, CHANNELS))  # still usable

    ThreadedCluster((1, 1)).run(main)


def test_without_gradients() -> None:
    def main(rank: int):
        layer = bps.SyncBatchNorm(CHANNELS)
        with torch.no_grad():
            y = layer(batches([2, 2])[rank])
        assert not y.requires_grad
        return layer.running_mean

    first, second = ThreadedCluster((1, 1)).run(main)
    assert torch.equal(first, second)


def test_a_process_set() -> None:
    def main(rank: int):
        ends = bps.add_process_set([0, 2])
        layer = copy.deepcopy(bps.SyncBatchNorm(CHANNELS, process_set=ends))
        if rank == 1:
            with pytest.raises(ValueError, match="Rank 1 is not a member of the provided process set"):
                layer(torch.ones(2, CHANNELS))
            return None
        return layer(batches([2, 2, 4])[rank]).detach()

    first, _, last = ThreadedCluster((2, 1)).run(main)
    parts = batches([2, 2, 4])
    expected = nn.BatchNorm2d(CHANNELS)(torch.cat([parts[0], parts[2]])).detach()
    torch.testing.assert_close(torch.cat([first, last]), expected)
