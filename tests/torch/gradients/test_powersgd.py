"""Compression.powersgd: factors of low rank, bit for bit those of one process that is all ranks, in plain torch."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from support.low_rank import Emulated
from support.threaded import ThreadedCluster, contract
from torch import nn

import byteps_py.torch as bps
from byteps_py.errors import GradientOrderError, MismatchError, UsageError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.gradients.comm_hook import _BucketAverage
from byteps_py.torch.gradients.factor_bucket import FactorBucket, LowRankMatrix, product
from byteps_py.torch.run.compression_state import load_of_machine

C = bps.Compression
MACHINES = (2, 1)
SHAPES = {"wide": (20, 60), "tall": (80, 24), "bias": (60,), "small": (3, 4), "conv": (16, 8, 3, 3)}
MATRICES = ("wide", "tall", "conv")


def values(rank: int, step: int, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A gradient that is a matrix of rank 3 with noise."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{rank} {step} {name}".encode()))
    shape = SHAPES[name]
    noise = torch.randn(shape, generator=generator) * 0.1
    if len(shape) > 1:
        left = torch.randn(shape[0], 3, generator=generator)
        noise += (left @ torch.randn(3, noise[0].numel(), generator=generator)).view(shape)
    return noise.to(dtype)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}


def wrapped(named: dict[str, nn.Parameter], compression: Any = None, **options: Any) -> Any:
    compression = C.powersgd(rank=4, min_compression_rate=1.0) if compression is None else compression
    return bps.DistributedOptimizer(torch.optim.SGD(named.values(), lr=1.0), named.items(), compression, **options)


def backward(named: dict[str, nn.Parameter], rank: int, step: int) -> None:
    sum((p * values(rank, step, name, p.dtype)).sum() for name, p in named.items()).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize("machines", [(1, 1), (2, 1), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("fusion_bytes", [0, 1 << 20])
def test_like_one_process(machines, fusion_bytes) -> None:
    def main(rank: int):
        named = parameters()
        optimizer = wrapped(named)
        found = []
        for step in range(5):
            backward(named, rank, step)
            optimizer.synchronize()
            found.append({name: p.grad.clone() for name, p in named.items()})
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
        return found

    results = ThreadedCluster(machines, fusion_bytes=fusion_bytes).run(main)
    n = sum(machines)
    emulated = {name: Emulated(name, SHAPES[name], machines) for name in MATRICES}
    for step in range(5):
        for name in SHAPES:
            given = [values(rank, step, name) for rank in range(n)]
            exact = name not in emulated
            expected = contract(given, machines, average=True) if exact else emulated[name].mean(given)
            assert all(torch.equal(found[step][name], expected) for found in results), (step, name)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.bfloat16, {}), (torch.float32, {"op": bps.Sum}), (torch.float32, {"backward_passes_per_step": 2})],
    ids=["bfloat16", "sum", "two passes"],
)
def test_options(dtype, options) -> None:
    passes = options.get("backward_passes_per_step", 1)

    def main(rank: int):
        named = {"wide": parameters(dtype)["wide"]}
        optimizer = wrapped(named, **options)
        for step in range(3):
            for batch in range(passes):
                backward(named, rank, step * passes + batch)
            optimizer.synchronize()
            grad = named["wide"].grad.clone()
            optimizer.zero_grad()
        return grad

    emulated = Emulated("wide", SHAPES["wide"], MACHINES)
    for step in range(3):
        batches = range(step * passes, (step + 1) * passes)
        given = [sum(values(rank, batch, "wide", dtype) for batch in batches) for rank in range(3)]
        expected = emulated.mean(given, average="op" not in options)
    assert all(torch.equal(found, expected.to(dtype)) for found in ThreadedCluster(MACHINES).run(main))


def test_predivide_changes_only_rounding() -> None:
    def main(rank: int):
        grads = []
        for factor in (1.0, 2.0):
            named = {"wide": parameters()["wide"]}
            optimizer = wrapped(named, gradient_predivide_factor=factor)
            backward(named, rank, 0)
            optimizer.synchronize()
            grads.append(named["wide"].grad.clone())
        torch.testing.assert_close(*grads)

    ThreadedCluster(MACHINES).run(main)


def test_process_sets_modules_and_missing_gradients() -> None:
    def main(rank: int):
        some = bps.add_process_set([0, 2])
        named = {"tall": parameters()["tall"]}
        optimizer = wrapped(named, process_set=some)
        for step in range(3):
            if (rank, step) != (2, 1):
                backward(named, rank, step)
            optimizer.synchronize()
            grad = named["tall"].grad.clone()
            optimizer.zero_grad()
        module = nn.Linear(60, 20, bias=False)
        ddp = bps.DistributedDataParallel(module, compression=C.powersgd(rank=4, min_compression_rate=1.0))
        (ddp(torch.eye(60)) * values(rank, 0, "wide").t()).sum().backward()
        return grad, module.weight.grad

    results = ThreadedCluster(MACHINES).run(main)
    emulated = Emulated("tall", SHAPES["tall"], (1, 1))
    for step in range(3):
        given = [values(0, step, "tall"), values(2, step, "tall") * (step != 1)]
        expected = emulated.mean(given)
    assert torch.equal(results[0][0], expected)
    assert torch.equal(results[2][0], expected)
    assert torch.equal(results[1][0], values(1, 2, "tall"))
    mean = Emulated("weight", SHAPES["wide"], MACHINES).mean([values(rank, 0, "wide") for rank in range(3)])
    assert all(torch.equal(found[1], mean) for found in results)


def test_cross_barrier() -> None:
    """The same training with and without it."""

    def train(rank: int, crosses: bool) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(60, 20), nn.ReLU(), nn.Linear(20, 60))
        with torch.no_grad():  # not torch.manual_seed: all ranks are threads of one process
            for param in model.parameters():
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())) * 0.2)
        optimizer = bps.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), C.powersgd(min_compression_rate=1)
        )
        if crosses:
            optimizer = bps.CrossBarrier(model, optimizer, num_steps=4)
        for step in range(4):
            model(values(rank, step, "wide")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    plain = ThreadedCluster(MACHINES).run(lambda rank: train(rank, False))
    crossing = ThreadedCluster(MACHINES).run(lambda rank: train(rank, True))
    assert all(torch.equal(found, plain[0]) for found in [*plain, *crossing])


def test_warm_up_and_rules() -> None:
    """Plain sums in the warm-up; then factors, which begin anew in another job."""
    compression = C.rules([("tall", C.none)], default=C.powersgd(min_compression_rate=1), warmup_steps=2)

    def main(rank: int):
        named = parameters()
        optimizer = wrapped(named, compression)
        kinds = {bucket.names[0]: type(bucket) for bucket in optimizer._stepper.reducer.buckets}
        assert kinds["wide"] is FactorBucket
        assert kinds["tall"] is not FactorBucket
        found = []
        for life in range(2):
            if life:
                bps.shutdown()
                bps.init()
            for step in range(4):
                backward(named, rank, step)
                optimizer.synchronize()
                found.append(named["wide"].grad.clone())
                optimizer.zero_grad(set_to_none=bool(step % 2))
        return found

    emulated = Emulated("wide", SHAPES["wide"], MACHINES)
    by_step = [[values(rank, step, "wide") for rank in range(3)] for step in range(4)]
    expected = [contract(given, MACHINES, average=True) for given in by_step[:2]]
    expected += [emulated.mean(given) for given in by_step[2:]]
    for found in ThreadedCluster(MACHINES, fusion_bytes=0).run(main):
        assert all(map(torch.equal, found, expected * 2))


def test_a_step_that_is_not_finite_leaves_factors_and_errors() -> None:
    """tests/jobs/test_powersgd_process.py has steps that are skipped, or raise."""

    def main(rank: int):
        named = {"wide": parameters()["wide"], "tall": parameters()["tall"]}
        optimizer = wrapped(named)
        found = []
        for step in range(4):
            bad = torch.nan if (step, rank) == (1, 1) else 0.0
            (named["wide"][3, 4] * bad + (named["tall"] * values(rank, step, "tall")).sum()).backward()
            optimizer.synchronize()
            assert bool(named["wide"].grad.isfinite().all()) == (step != 1)
            found.append(named["tall"].grad.clone())
            optimizer.zero_grad()
        return found

    emulated = Emulated("tall", SHAPES["tall"], MACHINES)
    results = ThreadedCluster(MACHINES, fusion_bytes=0).run(main)
    for step in range(4):
        expected = emulated.mean([values(rank, step, "tall") for rank in range(3)], is_used=step != 1)
        assert all(torch.equal(found[step], expected) for found in results), step


def test_a_gradient_scaler_skips_and_goes_on() -> None:
    def main(rank: int):
        named = {"wide": parameters()["wide"]}
        optimizer = wrapped(named)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        moved = []
        for step in range(4):
            loss = (named["wide"] * values(rank, step, "wide")).sum()
            if step == 1 and rank == 0:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            before = named["wide"].detach().clone()
            scaler.step(optimizer)
            scaler.update()
            moved.append(not torch.equal(before, named["wide"]))
            optimizer.zero_grad()
        assert named["wide"].isfinite().all()
        return moved

    assert ThreadedCluster(MACHINES).run(main) == [[True, False, True, True]] * 3


def test_an_early_change_of_a_gradient_is_noticed() -> None:
    def main(rank: int) -> None:
        named = {"wide": parameters()["wide"]}
        optimizer = wrapped(named)
        backward(named, rank, 0)
        named["wide"].grad.numpy()[0, 0] += 1
        with pytest.raises(GradientOrderError, match="'wide' was changed"):
            optimizer.synchronize()

    ThreadedCluster((1, 1)).run(main)


def test_a_sparse_gradient_of_a_matrix_travels_as_rows() -> None:
    def main(rank: int):
        table = nn.Embedding(200, 20, sparse=True)
        named = {"table": table.weight, "wide": parameters()["wide"]}
        optimizer = wrapped(named)
        for step in range(2):
            (table(torch.tensor([rank, 7])).sum() + (named["wide"] * values(rank, step, "wide")).sum()).backward()
            optimizer.synchronize()
            grads = named["table"].grad.to_dense()[:9, 0].tolist(), named["wide"].grad.clone()
            optimizer.zero_grad()
        return grads

    emulated = Emulated("wide", SHAPES["wide"], (1, 1))
    for step in range(2):
        expected = emulated.mean([values(rank, step, "wide") for rank in range(2)])
    for rows, wide in ThreadedCluster((1, 1)).run(main):
        assert rows == [0.5, 0.5, 0, 0, 0, 0, 0, 1.0, 0]
        assert torch.equal(wide, expected)


def test_frozen_and_tied_parameters_and_channels_last() -> None:
    """One is frozen until the third step, one is used twice, one lies in memory with its channels last."""

    def main(rank: int):
        named = parameters()
        with torch.no_grad():
            named["conv"].data = named["conv"].data.to(memory_format=torch.channels_last)
        named["wide"].requires_grad_(False)
        optimizer = wrapped(named)
        found = []
        for step in range(5):
            if step == 2:
                named["wide"].requires_grad_(True)
            used = {name: p for name, p in named.items() if p.requires_grad}
            loss = sum((p * values(rank, step, name)).sum() for name, p in used.items())
            (loss + (named["tall"] * values(rank, step, "tall")).sum()).backward()  # type: ignore[union-attr]
            optimizer.synchronize()
            found.append({name: None if p.grad is None else p.grad.clone() for name, p in named.items()})
            assert named["conv"].grad.is_contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
        return found

    results = ThreadedCluster(MACHINES).run(main)
    emulated = {name: Emulated(name, SHAPES[name], MACHINES) for name in MATRICES}
    for step in range(5):
        for name, each in emulated.items():
            if name == "wide" and step < 2:
                assert all(found[step][name] is None for found in results)
                continue
            given = [values(rank, step, name) * (2 if name == "tall" else 1) for rank in range(3)]
            expected = each.mean(given)
            assert all(torch.equal(found[step][name], expected) for found in results), (step, name)


def test_two_optimizers_and_clipping() -> None:
    def main(rank: int):
        first, second = ({name: parameters()[name]} for name in ("wide", "tall"))
        optimizers = [(first, wrapped(first)), (second, wrapped(second))]
        norms = []
        for step in range(3):
            for named, _ in optimizers:
                backward(named, rank, step)
            for named, optimizer in optimizers:
                optimizer.synchronize()
                norms.append(nn.utils.clip_grad_norm_(named.values(), 0.5))
                with optimizer.skip_synchronize():
                    optimizer.step()
                optimizer.zero_grad()
        return first["wide"].detach(), second["tall"].detach(), norms

    results = ThreadedCluster(MACHINES).run(main)
    emulated = [Emulated(name, SHAPES[name], MACHINES) for name in ("wide", "tall")]
    for number, (name, each) in enumerate(zip(("wide", "tall"), emulated, strict=True)):
        parameter = nn.Parameter(torch.zeros(SHAPES[name]))
        for step in range(3):
            parameter.grad = each.mean([values(rank, step, name) for rank in range(3)])
            nn.utils.clip_grad_norm_([parameter], 0.5)
            with torch.no_grad():
                parameter -= parameter.grad
        assert all(torch.equal(found[number], parameter) for found in results)


def test_ranks_with_other_factors_are_a_mismatch() -> None:
    def main(rank: int) -> None:
        named = {"wide": parameters()["wide"]}
        optimizer = wrapped(named, C.powersgd(rank=1 + rank))
        backward(named, rank, 0)
        with pytest.raises(MismatchError, match="powersgd of rank"):
            optimizer.synchronize()

    ThreadedCluster((1, 1)).run(main)


POWER = C.powersgd()


def diloco(compression: Any) -> Any:
    model = nn.Linear(60, 60)
    inner, outer = (torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2))
    return bps.local.DiLoCo(model, inner, outer, every=2, compression=compression)


def hooked(compression: Any) -> None:
    """What DistributedDataParallel's reducer does with a bucket of gradients."""
    _BucketAverage(torch.ones(10)).begin(contexts.current(), "bucket", compression)


REFUSED = {
    "push_pull": (lambda: bps.push_pull(torch.ones(50, 50), compression=POWER), "is for the gradients of"),
    "allreduce": (lambda: bps.allreduce(torch.ones(50, 50), compression=POWER), "is for the gradients of"),
    "reducescatter": (lambda: bps.reducescatter(torch.ones(50, 50), compression=POWER), "is for the gradients of"),
    "DiLoCo": (lambda: diloco(POWER), "is for the gradients of"),
    "comm hook": (lambda: hooked(POWER), "is for the gradients of"),
    "max": (lambda: wrapped(parameters(), op=bps.Max), "powersgd of rank 4 is for op=Average and op=Sum"),
    "adasum": (lambda: wrapped(parameters(), op=bps.Adasum), "powersgd of rank 4 is for op=Average and op=Sum"),
    "hosted": (lambda: wrapped(parameters(), hosted=True), "powersgd of rank 4 is not for hosted optimizers"),
    "shadow": (lambda: wrapped(parameters(), shadow=True), "powersgd of rank 4 is not for hosted optimizers"),
    "rank": (lambda: C.powersgd(rank=0), "factors of rank 1 to 1024, not rank=0"),
    "rate": (lambda: C.powersgd(min_compression_rate=0), "min_compression_rate above 0"),
    "feedback": (lambda: C.with_error_feedback(POWER), "is for compression with a codec"),
    "called": (lambda: wrapped(parameters(), C.powersgd), r"powersgd is a function: call it"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what) -> None:
    call, said = REFUSED[what]

    def main(rank: int) -> None:
        with pytest.raises(UsageError, match=said):
            call()
        assert bps.push_pull(torch.ones(2), name="x").tolist() == [1, 1]
        wrapped(parameters())

    ThreadedCluster((1, 1)).run(main)


def test_with_restarts() -> None:
    """Without a shadow all ranks are started again."""

    def main(rank: int) -> None:
        wrapped(parameters())
        bps.DistributedDataParallel(nn.Linear(60, 60), compression=C.powersgd())

    ThreadedCluster((1, 1), elastic=True, max_restarts=1).run(main)


@pytest.mark.parametrize("is_new_group", [False, True])
def test_a_state_goes_back_to_the_factors_and_errors_of_its_commit(is_new_group) -> None:
    """In the same group, and in a new one of the same ranks. tests/jobs/test_elastic_process.py has other ones."""

    def main(rank: int):
        named = parameters()
        optimizer = wrapped(named)
        state = bps.elastic.TorchState(optimizer=optimizer, step=0)
        state.sync()

        def go(first: int, last: int) -> list[torch.Tensor]:
            found = []
            for step in range(first, last):
                backward(named, rank, step)
                optimizer.synchronize()
                found += [named[name].grad.clone() for name in MATRICES]
                optimizer.zero_grad()
            return found

        go(0, 3)
        state.save()
        due = go(3, 6)
        state.restore()
        if is_new_group:
            bps.shutdown()
            bps.init()
            state.sync()
        assert all(map(torch.equal, go(3, 6), due))

    ThreadedCluster(MACHINES, elastic=True).run(main)


# ---- one matrix --------------------------------------------------------------------------------------------


def matrix(rank: int, shape: tuple[int, int], **options: Any) -> LowRankMatrix:
    low_rank = C.powersgd(rank, **options).low_rank
    assert low_rank is not None
    return LowRankMatrix(low_rank, shape, torch.float32, torch.device("cpu"), 5)


def step(one: LowRankMatrix, gradient: torch.Tensor) -> torch.Tensor:
    """Of a rank that is alone."""
    own = one.begin(gradient)
    assert own is not None
    result = one.product(own)
    one.commit(own)
    return result


def test_a_constant_gradient_of_low_rank_is_found_in_two_steps() -> None:
    gradient = torch.randn(30, 3) @ torch.randn(3, 50)
    one = matrix(4, (30, 50))
    for _ in range(2):
        found = step(one, gradient)
    later = torch.stack([step(one, gradient) for _ in range(8)])
    torch.testing.assert_close(later.mean(0), gradient, atol=0.2, rtol=0)
    assert found.isfinite().all()


def test_with_error_feedback_nothing_is_lost() -> None:
    gradient, one = torch.randn(30, 50), matrix(4, (30, 50))
    total = sum(step(one, gradient) for _ in range(40))
    assert (total / 40 - gradient).norm() < 0.25 * gradient.norm()  # type: ignore[operator]
    plain = matrix(4, (30, 50), error_feedback=False)
    total = sum(step(plain, gradient) for _ in range(40))
    assert (total / 40 - gradient).norm() > 0.5 * gradient.norm()  # type: ignore[operator]
    assert plain._error is None


def test_columns_that_are_lost_are_drawn_anew() -> None:
    """From zeros, and from a matrix of less than the factors' rank."""
    one = matrix(4, (30, 50))
    step(one, torch.zeros(30, 50))
    step(one, torch.randn(30, 1) @ torch.randn(1, 50))
    one._error = None
    gradient = torch.randn(30, 4) @ torch.randn(4, 50)
    for _ in range(2):
        found = step(one, gradient)
    torch.testing.assert_close(found, gradient, atol=1e-3, rtol=1e-3) if one._error is None else None
    assert found.count_nonzero()
    basis = one._orthonormal(one._factor.double().numpy())
    torch.testing.assert_close(basis.t() @ basis, torch.eye(4))


@pytest.mark.parametrize("shape", [(1, 1), (3, 100_000), (100_000, 3), (513, 300)])
def test_products_in_chunks_are_those_of_the_whole(shape) -> None:
    left, right = torch.randn(shape[0], 3), torch.randn(shape[1], 3)
    whole = left[:, :1] * right[:, 0] + left[:, 1:2] * right[:, 1] + left[:, 2:] * right[:, 2]
    assert torch.equal(product(left, right), whole)


def test_factors_begin_anew_after_a_join() -> None:
    """Ranks that join early have other factors than those that go on."""

    def main(rank: int):
        named = {"wide": parameters()["wide"]}
        optimizer = wrapped(named)
        found = []
        for life in range(2):
            if life:
                bps.join()
            for step in range(3):
                backward(named, rank, step)
                optimizer.synchronize()
                found.append(named["wide"].grad.clone())
                optimizer.zero_grad()
        return found

    emulated = Emulated("wide", SHAPES["wide"], MACHINES)
    expected = [emulated.mean([values(rank, step, "wide") for rank in range(3)]) for step in range(3)]
    for found in ThreadedCluster(MACHINES).run(main):
        assert all(map(torch.equal, found, expected * 2))


def test_factors_and_errors_are_saved_and_loaded() -> None:
    """In the same job, in the next one before its first step; and not where they do not fit."""

    def steps(named, optimizer, rank: int, first: int, last: int) -> list[torch.Tensor]:
        found = []
        for step in range(first, last):
            backward(named, rank, step)
            optimizer.synchronize()
            found += [named[name].grad.clone() for name in MATRICES]
            optimizer.zero_grad()
        return found

    def first_job(rank: int):
        named = parameters()
        optimizer = wrapped(named)
        steps(named, optimizer, rank, 0, 3)
        kept = bps.compression_state_dict()
        due = steps(named, optimizer, rank, 3, 6)
        bps.load_compression_state_dict(kept)
        assert all(map(torch.equal, steps(named, optimizer, rank, 3, 6), due))
        return kept, due

    kept = ThreadedCluster(MACHINES).run(first_job)

    def second_job(rank: int) -> None:
        state, due = kept[rank]
        named = parameters()
        optimizer = wrapped(named)
        with pytest.raises(UsageError, match=r"its factors are of rank \d of 3, and this is rank"):
            bps.load_compression_state_dict({**state, "rank": (rank + 1) % 3})
        bps.load_compression_state_dict(state)
        again = bps.compression_state_dict()["factors"]
        assert all(torch.equal(again[key]["error"], each["error"]) for key, each in state["factors"].items())
        assert all(map(torch.equal, steps(named, optimizer, rank, 3, 6), due))

    ThreadedCluster(MACHINES).run(second_job)

    def of_a_run_state(rank: int) -> None:
        named = parameters()
        optimizer = wrapped(named)
        load_of_machine([state for state, _ in kept])
        assert all(map(torch.equal, steps(named, optimizer, rank, 3, 6), kept[rank][1]))

    ThreadedCluster(MACHINES).run(of_a_run_state)

    def another_job(rank: int) -> None:
        """Its factors have another rank."""
        named = parameters()
        optimizer = wrapped(named, C.powersgd(rank=2, min_compression_rate=1.0))
        bps.load_compression_state_dict(kept[rank][0])
        assert not bps.compression_state_dict()["factors"]
        assert all(each.isfinite().all() for each in steps(named, optimizer, rank, 0, 2))

    ThreadedCluster(MACHINES).run(another_job)


def test_ranks_that_load_other_factors_are_a_mismatch() -> None:
    def main(rank: int) -> None:
        named = {"wide": parameters()["wide"]}
        optimizer = wrapped(named)
        backward(named, rank, 0)
        optimizer.synchronize()
        kept = bps.compression_state_dict()
        bps.shutdown()
        bps.init()
        if rank:
            bps.load_compression_state_dict(kept)
        backward(named, rank, 1)
        with pytest.raises(MismatchError, match="with loaded factors"):
            optimizer.synchronize()

    ThreadedCluster((1, 1)).run(main)
