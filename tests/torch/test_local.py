"""bps.local.DiLoCo against the algorithm, written down here for one process, parameter by parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.coded_sums import CodedSums
from support.threaded import ThreadedCluster
from torch import nn

import byteps_py.torch as bps
from byteps_py.tensor_codec import Codec
from byteps_py.torch.local import DecoupledDiLoCo, DiLoCo, Streaming

MACHINES = (2, 1)
STEPS = 24
#: Which of the six parameters are in which fragment.
PIECES = {1: [[0, 1, 2, 3, 4, 5]], 2: [[0, 1, 2], [3, 4, 5]], 3: [[0], [1, 2], [3, 4, 5]]}


def new_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    generator = torch.Generator().manual_seed(seed)  # ranks are threads, and have one global generator
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.5, 0.5, generator=generator)
    return model.to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(5, 4, generator=generator, dtype=torch.float64).to(dtype)
    return (model(inputs) - rank).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02)


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten().double() for param in model.parameters()])


def emulate(
    every: int, fragments: int = 1, delay: int = 0, alpha: float = 0.0, inner_of: Any = adamw, steps: int = STEPS
) -> list[nn.Module]:
    """The models of all ranks after the last step, without the final synchronize()."""
    size = sum(MACHINES)
    models = [new_model() for _ in range(size)]
    inner = [inner_of(model) for model in models]
    overall = list(new_model().parameters())
    outer = torch.optim.SGD(overall, lr=0.7, momentum=0.9, nesterov=True)
    means: dict[int, torch.Tensor] = {}
    due: dict[int, list[int]] = {}
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            train(model, inner[rank], rank, range(step, step + 1))
        for number, piece in enumerate(PIECES[fragments]):
            if step % every == (number + 1) * every // fragments % every:
                for i in piece:
                    means[i] = sum(overall[i].detach() - list(m.parameters())[i].detach() for m in models) / size
                due.setdefault(step + delay, []).append(number)
        for number in due.pop(step, []):
            for i, param in enumerate(overall):
                param.grad = means[i] if i in PIECES[fragments][number] else None
            outer.step()
            for i in PIECES[fragments][number]:
                for model in models:
                    own = list(model.parameters())[i]
                    own.data = alpha * own.detach() + (1 - alpha) * overall[i].detach()
    return models


@pytest.mark.parametrize(
    ("every", "fragments", "delay", "alpha"),
    [(1, 1, 0, 0.0), (6, 1, 0, 0.0), (6, 3, 0, 0.0), (6, 2, 2, 0.5), (7, 3, 5, 0.25), (4, 1, 3, 0.0)],
)
def test_like_one_process(every: int, fragments: int, delay: int, alpha: float) -> None:
    expected = [weights(model) for model in emulate(every, fragments, delay, alpha)]

    def main(rank: int) -> None:
        model = new_model(seed=rank)  # rank 0's counts
        optimizer = DiLoCo(model, adamw(model), every=every, streaming=Streaming(fragments, delay, alpha))
        train(model, optimizer, rank, range(1, STEPS + 1))
        torch.testing.assert_close(weights(model), expected[rank], rtol=0, atol=1e-12)
        optimizer.synchronize()
        alike = bps.allgather(weights(model).unsqueeze(0), name="weights")
        assert torch.equal(alike, weights(model).expand(3, -1))

    ThreadedCluster(MACHINES).run(main)


def test_each_step_with_plain_sgd_is_synchronous_training() -> None:
    """Numbers that the arithmetic of both represents exactly, so that the order of operations has no say."""

    def trained(rank: int, wrap: Callable[[nn.Module], Any]) -> torch.Tensor:
        model = nn.Linear(3, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = wrap(model)
        for step in range(10):
            optimizer.zero_grad()
            (model(torch.tensor([[step, 2.0, rank - step]])).sum()).backward()
            optimizer.step()
        return model.weight.detach()

    def main(rank: int) -> None:
        def plain(model: nn.Module, lr: float = 0.125) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=lr)

        averaged = trained(rank, lambda model: bps.DistributedOptimizer(plain(model), model.named_parameters()))
        combined = trained(rank, lambda model: DiLoCo(model, plain(model), plain(model, 1.0), every=1))
        assert torch.equal(averaged, combined)

    ThreadedCluster((1, 1)).run(main)


def test_a_state_between_sending_and_using_a_fragment() -> None:
    def main(rank: int) -> None:
        def made(model: nn.Module) -> DiLoCo:
            outer = torch.optim.AdamW(model.parameters(), lr=0.1)
            return DiLoCo(model, adamw(model), outer, every=6, streaming=Streaming(2, delay=2))

        model = new_model()
        optimizer = made(model)
        train(model, optimizer, rank, range(10))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        assert [fragment["has_values"] for fragment in saved[1]["fragments"]] == [True, False]
        train(model, optimizer, rank, range(10, STEPS))
        other = new_model(seed=1)
        again = made(other)
        other.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
        train(other, again, rank, range(10, STEPS))
        assert torch.equal(weights(other), weights(model))
        assert (again.steps, again.outer_steps) == (optimizer.steps, optimizer.outer_steps) == (24, 7)
        with pytest.raises(bps.UsageError, match=r"has fragments of .* make the DiLoCo with the same model and fragm"):
            DiLoCo(other, adamw(other), every=6).load_state_dict(saved[1])
        with pytest.raises(bps.UsageError, match="no state_dict of a DiLoCo"):
            again.load_state_dict({"steps": 1})
        with pytest.raises(bps.UsageError, match=r"can't be copied or pickled: save, copy or send its state_dict\(\)"):
            copy.deepcopy(again)

    ThreadedCluster(MACHINES).run(main)


def test_elastic_training_goes_on_from_where_it_is() -> None:
    """Nothing is lost or repeated, also of the ranks' own steps since the last outer one."""
    expected = weights(emulate(4, steps=12)[0])

    def main(rank: int) -> None:
        model = new_model(seed=rank)
        state = bps.elastic.TorchState(optimizer=DiLoCo(model, adamw(model), every=4))
        begun: list[int] = []

        @bps.elastic.run
        def loop(state: Any) -> None:
            optimizer = state.optimizer
            begun.append(optimizer.steps)
            while optimizer.steps < 12:
                train(model, optimizer, rank, range(optimizer.steps + 1, optimizer.steps + 2))
                if optimizer.steps == 7 and len(begun) == 1:
                    bps.push_pull(torch.ones(2 + rank), name="disagree")

        loop(state)
        assert begun == [0, 7]
        with pytest.raises(bps.UsageError, match=r"TorchState: 'model' would go back .* give the DiLoCo alone"):
            bps.elastic.TorchState(model, state.optimizer)
        assert (state.optimizer.steps, state.optimizer.outer_steps) == (12, 3)
        torch.testing.assert_close(weights(model), expected, rtol=0, atol=1e-12)

    ThreadedCluster(MACHINES).run(main)


def test_ranks_reach_fragments_in_different_orders() -> None:
    def main(rank: int) -> None:
        models = [new_model(seed) for seed in (0, 1)]
        optimizers = [DiLoCo(model, adamw(model), every=3, streaming=Streaming(3, delay=2)) for model in models]
        order = (0, 1) if rank else (1, 0)
        for step in range(STEPS):
            for i in order:
                train(models[i], optimizers[i], rank, range(step, step + 1))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.synchronize()
            everyone = bps.allgather(weights(model).unsqueeze(0), name="weights")
            assert torch.equal(everyone, weights(model).expand(3, -1))

    ThreadedCluster(MACHINES).run(main)


def test_ranks_of_a_site_train_together() -> None:
    """Sites {0, 1} and {2}: ranks of a site stay equal, sites differ until they are combined."""

    def main(rank: int) -> None:
        sites = [bps.add_process_set([0, 1]), bps.add_process_set([2])]
        model = new_model()
        site = sites[0] if rank < 2 else sites[1]
        inner = bps.DistributedOptimizer(adamw(model), model.named_parameters(), process_set=site)
        optimizer = DiLoCo(model, inner, every=4)
        train(model, optimizer, rank, range(6))
        everyone = bps.allgather(weights(model).unsqueeze(0), name="weights")
        assert torch.equal(everyone[0], everyone[1])
        assert not torch.equal(everyone[0], everyone[2])
        train(model, optimizer, rank, range(6, 8))
        everyone = bps.allgather(weights(model).unsqueeze(0), name="weights")
        assert torch.equal(everyone, everyone[:1].expand(3, -1))

    ThreadedCluster(MACHINES).run(main)


def test_a_scaler_is_refused_where_sites_average_gradients() -> None:
    """It looks at gradients before they are averages, so that some ranks of a site would wait for others."""

    def main(rank: int) -> None:
        site = [bps.add_process_set([0, 1]), bps.add_process_set([2])][rank // 2]
        model = new_model(dtype=torch.float32)
        inner = bps.DistributedOptimizer(sgd(model), model.named_parameters(), process_set=site)
        optimizer = DiLoCo(model, inner, every=4)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, rank, 0)).backward()
        with pytest.raises(bps.UsageError, match="a GradScaler is not for inner optimizers that average gradients"):
            scaler.step(optimizer)
        assert optimizer.steps == 0

    ThreadedCluster(MACHINES).run(main)


def test_muon_beside_adamw_in_bfloat16() -> None:
    def main(rank: int) -> None:
        model = new_model(dtype=torch.bfloat16)
        matrices = [param for param in model.parameters() if param.ndim == 2]
        rest = [param for param in model.parameters() if param.ndim < 2]
        inner = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.02)]
        optimizer = DiLoCo(model, inner, every=5, compression=bps.Compression.int8)
        train(model, optimizer, rank, range(10))
        assert {copied.dtype for group in optimizer.outer.param_groups for copied in group["params"]} == {torch.float32}
        everyone = bps.allgather(weights(model).unsqueeze(0), name="weights")
        assert torch.equal(everyone, everyone[:1].expand(3, -1))
        assert len(optimizer.param_groups) == 2
        with pytest.raises(bps.UsageError, match="a closure is for one inner optimizer"):
            optimizer.step(lambda: 0.0)

    ThreadedCluster(MACHINES).run(main)


def emulate_what_is_left_out(bits: int, delay: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The weights of all ranks before ``synchronize``, and after it: ranks keep what was not sent."""
    size, every, alpha = sum(MACHINES), 4, 0.5 if delay else 0.0
    models = [new_model(dtype=torch.float32) for _ in range(size)]
    inner = [sgd(model) for model in models]
    sums, overall = CodedSums(Codec.topk(SENT, bits=bits), list(MACHINES)), flat(models[0]).clone()
    mean = torch.zeros(0)
    for step in range(1, STEPS + 1):
        for rank, model in enumerate(models):
            train(model, inner[rank], rank, range(step, step + 1))
        if step % every == 0:
            mean = sums([overall - flat(model) for model in models], size)
        if step >= every and (step - delay) % every == 0:
            overall -= mean
            for model in models:
                own = flat(model)
                put(model, torch.where(mean != 0, own.lerp(overall, 1 - alpha) if alpha else overall, own))
    rest = [overall - flat(model) for model in models]
    return [flat(model) for model in models], overall - (rest[0] + rest[1] + rest[2]) / size


#: The share of 81 parameters in a block of 4,096 elements, of which 20 are sent.
SENT = 20 / 4096


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def put(model: nn.Module, values: torch.Tensor) -> None:
    params = list(model.parameters())
    with torch.no_grad():
        for param, part in zip(params, values.split([param.numel() for param in params]), strict=True):
            param.copy_(part.view(param.shape))


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("bits", [2, 32])
def test_ranks_keep_what_a_compression_leaves_out(bits: int, delay: int) -> None:
    """With error feedback or without; ``synchronize`` sends all of it."""
    before, after = emulate_what_is_left_out(bits, delay)

    def main(rank: int) -> None:
        for feedback in (False, True):
            model = new_model(dtype=torch.float32)
            compression = bps.Compression.topk(SENT, error_feedback=feedback, bits=bits)
            outer = torch.optim.SGD(model.parameters(), lr=1.0)
            streaming = Streaming(delay=delay)
            optimizer = DiLoCo(model, sgd(model), outer, every=4, streaming=streaming, compression=compression)
            for step in range(1, STEPS + 1):
                train(model, optimizer, rank, range(step, step + 1))
                if step == 8 + delay // 2:  # goes on from its state: with a delay, a mean is under way
                    state, kept = optimizer.state_dict(), copy.deepcopy(model.state_dict())
                    model = new_model(dtype=torch.float32)
                    outer = torch.optim.SGD(model.parameters(), lr=1.0)
                    optimizer = DiLoCo(model, sgd(model), outer, every=4, streaming=streaming, compression=compression)
                    model.load_state_dict(kept)
                    optimizer.load_state_dict(state)
            if not delay:  # with one, the last mean is still under way in the emulation
                assert torch.equal(flat(model), before[rank])
            optimizer.synchronize()
            everyone = bps.allgather(flat(model).unsqueeze(0), name=f"weights.{feedback}")
            assert torch.equal(everyone, everyone[:1].expand(3, -1))
            if not delay:
                torch.testing.assert_close(flat(model), after, rtol=1e-6, atol=1e-6)

    ThreadedCluster(MACHINES, min_compress_bytes=0).run(main)


@pytest.mark.parametrize("compression", [bps.Compression.none, bps.Compression.int8], ids=["none", "int8"])
def test_a_rank_with_nan_is_named_on_all_ranks(compression: Any) -> None:
    def main(rank: int) -> None:
        model = new_model(dtype=torch.float32)
        optimizer = DiLoCo(model, sgd(model), every=4, streaming=Streaming(2), compression=compression)
        train(model, optimizer, rank, range(2))
        if rank == 1:
            with torch.no_grad():
                model[2].weight[3, 5] = float("inf")
        before = weights(model)
        with pytest.raises(
            bps.NonFiniteError, match=r"from rank 1, step 4: in the changes .*'2\.bias' .*NONFINITE=allow"
        ):
            train(model, optimizer, rank, range(2, 9))
        assert optimizer.outer_steps == 1
        if rank != 1:
            assert weights(model).isfinite().all()
            assert not torch.equal(before, weights(model))  # its own steps were made, and no outer one

    ThreadedCluster(MACHINES, nonfinite="raise", min_compress_bytes=0).run(main)


def test_values_that_are_not_finite_pass_unless_it_is_asked_for() -> None:
    def main(rank: int) -> None:
        model = new_model()
        optimizer = DiLoCo(model, sgd(model), every=4)
        if rank == 1:
            with torch.no_grad():
                model[4].bias[0] = float("nan")
        train(model, optimizer, rank, range(4))
        assert weights(model).isnan().any()

    ThreadedCluster(MACHINES).run(main)

    def skipping(rank: int) -> None:
        model = new_model()
        with pytest.raises(
            bps.UsageError, match=r"can't be had with BYTEPS_NONFINITE=skip: .* Use BYTEPS_NONFINITE=raise"
        ):
            DiLoCo(model, sgd(model), every=4)

    ThreadedCluster(MACHINES, nonfinite="skip").run(skipping)


def test_parameters_that_are_not_trained_stay() -> None:
    def main(rank: int) -> None:
        model = new_model(seed=rank)
        first = model[0].weight.detach().clone()
        inner = torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1)
        optimizer = DiLoCo(model, inner, every=2)
        train(model, optimizer, rank, range(4))
        assert torch.equal(model[0].weight, first)

    ThreadedCluster(MACHINES).run(main)


def test_a_schedule_of_the_outer_optimizer() -> None:
    def main(rank: int) -> None:
        model = new_model()
        outer = torch.optim.SGD(model.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(outer, 1, 0.0)
        optimizer = DiLoCo(model, adamw(model), outer, every=2)
        train(model, optimizer, rank, range(2))
        schedule.step()
        before = weights(model)
        train(model, optimizer, rank, range(2, 4))
        assert torch.equal(weights(model), before)  # with a learning rate of 0 nothing is kept

    ThreadedCluster(MACHINES).run(main)


def test_a_scaler_that_finds_an_infinity_on_one_rank() -> None:
    """It makes no inner step there, and an outer one with the others. Scales are powers of two: they change no bits."""

    def main(rank: int) -> None:
        plain, scaled = new_model(dtype=torch.float32), new_model(dtype=torch.float32)
        first, second = (DiLoCo(model, sgd(model), every=4) for model in (plain, scaled))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(8):
            for model, optimizer in ((plain, first), (scaled, second)):
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                is_lost = rank == 2 and step == 5
                if optimizer is first:
                    loss.backward()
                    if is_lost:
                        optimizer.zero_grad()
                    optimizer.step()
                    continue
                (scaler.scale(loss) * (float("inf") if is_lost else 1.0)).backward()
                if step % 2:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
        assert torch.equal(weights(plain), weights(scaled))
        assert (second.steps, second.outer_steps) == (8, 2)
        assert scaler.get_scale() == (128.0 if rank == 2 else 256.0)

    ThreadedCluster(MACHINES).run(main)


def test_a_run_state_goes_on_in_the_middle() -> None:
    def main(rank: int) -> None:
        def loop(model: nn.Module, until: int, state: dict[str, Any] | None = None) -> dict[str, Any]:
            optimizer = DiLoCo(model, adamw(model), every=4, streaming=Streaming(2, delay=1))
            run = bps.RunState(model, optimizer)
            if state is not None:
                run.load_state_dict(state)
            for step in run.iterations(until):
                train(model, optimizer, rank, range(step, step + 1))
            return copy.deepcopy(run.state_dict())

        whole, half, rest = (new_model() for _ in range(3))
        loop(whole, 12)
        loop(rest, 12, loop(half, 7))
        assert torch.equal(weights(rest), weights(whole))

    ThreadedCluster(MACHINES).run(main)


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    return optimizer


REFUSED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "every": (lambda m: DiLoCo(m, adamw(m), every=0), "every is a whole number of at least 1, not 0"),
    "bool": (lambda m: DiLoCo(m, adamw(m), every=True), "every is a whole number of at least 1, not True"),
    "fragments": (lambda m: DiLoCo(m, adamw(m), every=9, streaming=Streaming(7)), "7 fragments of 6 parameters"),
    "no fragments": (lambda m: DiLoCo(m, adamw(m), every=9, streaming=Streaming(0)), "fragments is a whole number of"),
    "more fragments": (lambda m: DiLoCo(m, adamw(m), every=2, streaming=Streaming(3)), "within every=2 steps"),
    "delay": (
        lambda m: DiLoCo(m, adamw(m), every=2, streaming=Streaming(delay=2)),
        "next outer step is due after every=2 steps",
    ),
    "alpha": (
        lambda m: DiLoCo(m, adamw(m), every=2, streaming=Streaming(alpha=1.0)),
        "alpha is a share of at least 0 and below 1",
    ),
    "other model": (lambda m: DiLoCo(m, adamw(new_model()), every=2), "6 parameters, of which 0 are of the model"),
    "twice": (lambda m: DiLoCo(m, [adamw(m), sgd(m)], every=2), "12 parameters, of which 6 are of the model"),
    "outer of others": (
        lambda m: DiLoCo(m, adamw(m), torch.optim.SGD(m[0].parameters(), lr=1), every=2),
        "the outer optimizer has 2 parameters, the inner ones have 6",
    ),
    "outer has stepped": (lambda m: DiLoCo(m, adamw(m), stepped(m), every=2), "outer optimizer has made steps"),
    "distributed": (
        lambda m: DiLoCo(m, bps.DistributedOptimizer(adamw(m), m.named_parameters()), every=2),
        "averages gradients over all ranks in every step already",
    ),
    "distributed outer": (
        lambda m: DiLoCo(m, adamw(m), bps.DistributedOptimizer(adamw(m), m.named_parameters()), every=2),
        "the outer optimizer gets means already",
    ),
    "momentum of what is left out": (
        lambda m: DiLoCo(
            m, adamw(m), every=2, compression=bps.Compression.with_momentum(bps.Compression.topk(0.1), mu=0.9)
        ),
        "would count a change again in each outer step until it is sent",
    ),
    "codec of float64": (lambda m: DiLoCo(m, adamw(m), every=2, compression=bps.Compression.int8), "not for float64"),
    "decoupled draws": (
        lambda m: DecoupledDiLoCo(m, adamw(m), every=2, quorum=1, compression=bps.Compression.randomk(0.1)),
        "DecoupledDiLoCo: compression <randomk .* is not for changes that machines send at different times",
    ),
    "decoupled 16 bits": (
        lambda m: DecoupledDiLoCo(m, adamw(m), every=2, quorum=1, compression=bps.Compression.bf16),
        "DecoupledDiLoCo: compression BF16Compressor is not for changes .* Give bps.Compression.int8",
    ),
    "decoupled momentum": (
        lambda m: DecoupledDiLoCo(
            m, adamw(m), every=2, quorum=1, compression=bps.Compression.with_momentum(bps.Compression.int8)
        ),
        "has momentum, and so has the outer optimizer",
    ),
    "decoupled codec of float64": (
        lambda m: DecoupledDiLoCo(m, adamw(m), every=2, quorum=1, compression=bps.Compression.int8),
        "not for float64",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    call, said = REFUSED[what]

    def main(rank: int) -> None:
        model = new_model()
        with pytest.raises(bps.UsageError, match=said):
            call(model)
        model = new_model()
        DiLoCo(model, adamw(model), every=2)  # no name is taken

    ThreadedCluster(MACHINES).run(main)
