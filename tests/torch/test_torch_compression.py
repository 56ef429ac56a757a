"""What ``compression`` arguments mean, and what is refused, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.threaded import ThreadedCluster

import byteps_py.torch as bps
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.compression import compression_of
from byteps_py.torch.run.compression_state import load_of_machine

C = bps.Compression
EVERY = {"min_compress_bytes": 0}


def test_dictionaries_of_byteps() -> None:
    for choice, same in [
        ({"compressor": "topk", "k": 0.01}, C.topk(0.01)),
        ({"compressor": "topk", "k": "0.5", "ef": "vanilla"}, C.topk(0.5, error_feedback=True)),
        ({"compressor": "onebit"}, C.onebit(scaling=False)),
        ({"compressor": "onebit", "scaling": True, "ef": "vanilla"}, C.onebit(error_feedback=True)),
        ({"compressor": "onebit", "scaling": "true"}, C.onebit()),
        ({"compressor": "randomk", "k": 0.02, "seed": "7"}, C.randomk(0.02, seed=7)),
        ({"compressor": "dithering", "k": 4}, C.dithering(4)),
        (
            {"compressor": "dithering", "k": "7", "partition": "natural", "normalize": "l2", "seed": 3},
            C.dithering(7, "natural", "l2", 3),
        ),
        (
            {"compressor": "onebit", "scaling": True, "ef": "vanilla", "momentum": "nesterov", "mu": 0.9},
            C.with_momentum(C.onebit(error_feedback=True), 0.9),
        ),
        (C.bf16, C.bf16),
    ]:
        assert compression_of(choice) is same


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"compressor": "onebyte", "scaling": True}, "the compressor 'onebyte' is not here; onebit, topk, randomk"),
        ({"k": 0.1}, "the compressor None"),
        ({"compressor": "topk", "k": 0.1, "momentum": "nesterov"}, "mu=None of .* is no number"),
        ({"compressor": "topk", "k": 0.1, "momentum": "nesterov", "mu": 1}, "mu above 0 and below 1, not mu=1.0"),
        ({"compressor": "topk", "k": 0.1, "momentum": "polyak", "mu": 0.9}, "momentum='polyak' of .* 'nesterov' is"),
        ({"compressor": "topk", "k": 0.1, "mu": 0.9}, "'mu' of .* is not known: there are compressor, ef"),
        ({"compressor": "onebit", "k": 4, "fp16": True}, "'k', 'fp16' of .* is not known"),
        ({"compressor": "topk", "k": 0.1, "ef": "corrected"}, "ef='corrected'"),
        ({"compressor": "topk", "k": 1.5}, "k=1.5 is neither a share below 1 nor a whole number"),
        ({"compressor": "topk", "k": 0}, "a share above 0 and up to 1"),
        ({"compressor": "randomk", "k": -1}, "a share above 0 and up to 1"),
        ({"compressor": "topk", "k": "many"}, "k='many' of .* is no number"),
        ({"compressor": "topk"}, "k=None"),
        ({"compressor": "randomk", "k": 0.1, "seed": -1}, "a seed is a whole number from 0"),
        ({"compressor": "dithering", "k": 128}, "dithering has k = 1 to 127 levels, not k=128"),
        ({"compressor": "dithering", "k": 4, "partition": "cubic"}, "partition='cubic' of .* 'linear' or 'natural' is"),
        ({"compressor": "dithering", "k": 4, "normalize": "l1"}, "normalize='l1'"),
        ({"compressor": "onebit", "scaling": "perhaps"}, "scaling='perhaps'"),
        ("int8", r"say compression=bps\.Compression\.int8"),
        (None, "got None"),
        (C.onebit, r"bps\.Compression\.onebit is a function: call it, bps\.Compression\.onebit\("),
    ],
)
def test_what_compression_is_not(choice: Any, said: str) -> None:
    with pytest.raises(bps.UsageError, match=said):
        compression_of(choice)


def test_decorators_need_a_codec() -> None:
    with pytest.raises(bps.UsageError, match=r"error feedback is for compression with a codec, .* not FP16Compressor"):
        C.with_error_feedback(C.fp16)
    with pytest.raises(bps.UsageError, match=r"momentum is for compression with a codec, .* not Compressor"):
        C.with_momentum(C.none)
    assert C.with_error_feedback(C.topk(0.1)) is C.topk(0.1, error_feedback=True)


@pytest.mark.parametrize("compressor", ["topk", "randomk"])
def test_a_count_of_elements_is_one_of_each_tensor(compressor: str) -> None:
    def main(rank: int) -> None:
        choice = {"compressor": compressor, "k": 40}
        given = torch.arange(1.0, 41)
        assert torch.equal(bps.push_pull(given, False, "all", compression=choice), 2 * given)
        with pytest.raises(
            bps.UsageError, match=r"tensor 'few': .* k=40 of its elements, but it has 39: give a smaller"
        ):
            bps.push_pull(torch.ones(39), False, "few", compression=choice)

    ThreadedCluster(**EVERY).run(main)


def optimizer(compression: Any, parameter: torch.Tensor | None = None, **how: Any) -> Any:
    parameter = torch.nn.Parameter(torch.ones(5) if parameter is None else parameter)
    return bps.DistributedOptimizer(torch.optim.SGD([parameter], 0.1), [("w", parameter)], compression, **how)


INT8, FEEDBACK = C.int8, C.topk(0.1, error_feedback=True)
REFUSED = {
    "int32": (lambda: bps.push_pull(torch.ones(3, dtype=torch.int32), False, "x", compression=INT8), "not for int32"),
    "int64 average": (lambda: bps.push_pull(torch.ones(3, dtype=torch.int64), compression=INT8), "not for int64"),
    "float64": (lambda: optimizer(INT8, torch.ones(3, dtype=torch.float64)), "not for float64"),
    "min": (lambda: bps.push_pull(torch.ones(3), name="x", op=bps.Min, compression=INT8), "not for op=Min"),
    "adasum": (lambda: bps.allreduce(torch.ones(3), op=bps.Adasum, compression=INT8), "not for op=Adasum"),
    "reducescatter": (lambda: bps.reducescatter(torch.ones(4), compression=INT8), "not for a reducescatter"),
    "hosted": (
        lambda: optimizer(FEEDBACK, hosted=True),
        "with a hosted optimizer needs hosted='machine': .* such as int8",
    ),
    "sharded": (lambda: optimizer(C.thc(), hosted="sharded"), "with a hosted optimizer needs hosted='machine'"),
    "shadow": (
        lambda: optimizer(C.with_momentum(INT8, 0.5), hosted="machine", shadow=True),
        "int8 with momentum 0.5 is not for shadow=True and BYTEPS_SHADOW=1: what a machine has not sent yet has no",
    ),
    "shadow thc": (lambda: optimizer(C.thc(), hosted="machine", shadow=True), "is not for shadow=True and BYTEPS_SH"),
    "shadow alone": (lambda: optimizer(FEEDBACK, shadow=True), "is not for shadow=True and BYTEPS_SHADOW=1"),
    "shadow of changes": (
        lambda: optimizer(C.none, hosted="sharded", shadow=True, parameter_compression=INT8),
        r"parameter_compression does not go together with shadow=True or BYTEPS_SHADOW=1",
    ),
    "hosted warm-up": (
        lambda: optimizer(C.with_warmup(INT8, 2), hosted="machine"),
        "with a warm-up is not for hosted optimizers",
    ),
    "adasum optimizer": (lambda: optimizer(INT8, op=bps.Adasum), "not for op=Adasum"),
    "max optimizer": (lambda: optimizer(INT8, op=bps.Max), "not for op=Max"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    call, said = REFUSED[what]

    def main(rank: int) -> None:
        with pytest.raises(bps.UsageError, match=said):
            call()
        assert bps.push_pull(torch.ones(2), name="x").tolist() == [1, 1]  # nothing was sent, no name is taken
        optimizer(C.none)

    ThreadedCluster().run(main)


def test_error_feedback_is_refused() -> None:
    def main(rank: int) -> None:
        with pytest.raises(bps.UsageError, match=r"can't be had with BYTEPS_NONFINITE=skip: .* or BYTEPS_NON"):
            optimizer(FEEDBACK)
        optimizer(INT8)

    ThreadedCluster(nonfinite="skip").run(main)


@pytest.mark.parametrize("settings", [{}, {"max_restarts": 1}], ids=str)
def test_error_feedback_in_an_elastic_job(settings: dict[str, Any]) -> None:
    ThreadedCluster(elastic=True, **settings).run(lambda rank: optimizer(FEEDBACK))


def test_what_a_rank_keeps_for_codecs_is_named() -> None:
    def main(rank: int) -> None:
        context = contexts.current()
        bps.push_pull(torch.ones(5000), False, "x", compression=INT8)
        assert not context.kept_by_codecs()
        bps.push_pull(torch.ones(5000), False, "y", compression=FEEDBACK)
        assert context.kept_by_codecs() == f"what tensor 'y' with compression {FEEDBACK.codec} has not sent yet"

    ThreadedCluster(**EVERY).run(main)


def test_saved_states_that_can_not_be_loaded() -> None:
    """See tests/programs/compression.py for those that can."""

    def main(rank: int) -> None:
        saved = bps.compression_state_dict()
        nothing = {"tensors": {}, "factors": {}}
        place = {"machine": rank, "machines": 2, "rank": rank, "ranks": 2}
        assert saved == {"format": "byteps_py.compression 1", **place, **nothing}
        bps.load_compression_state_dict(saved)
        no_parts = {"x": {"shape": [3], "dtype": 0, "codec": [FEEDBACK.codec.code, 0.0]}}
        for wrong, said in (
            ({"format": "another"}, r"this is no compression_state_dict\(\)"),
            ({"machines": 3}, "saved in a job of 3 machines, and this one has 2: .* Leave it out"),
            ({"machine": 1 - rank}, f"it is of machine {1 - rank}, and rank {rank} is on machine {rank}"),
            ({"tensors": no_parts}, "what is said of tensor 'x' is damaged: 0 bytes in the place of 12"),
        ):
            with pytest.raises(bps.UsageError, match=said):
                bps.load_compression_state_dict({**saved, **wrong})

    ThreadedCluster().run(main)


def test_a_run_of_other_machines_begins_with_zeros(caplog: pytest.LogCaptureFixture) -> None:
    """RunState has what all ranks had."""
    saved = {"machine": 0, "machines": 3, "tensors": {"x": {}}}

    def main(rank: int) -> None:
        load_of_machine([saved, None])

    ThreadedCluster().run(main)
    assert "begin with zeros: they were saved in a job of 3 machines, and this one has 2" in caplog.text


@pytest.mark.parametrize(
    "codecs",
    [
        (C.int8, C.float8),
        (C.topk(0.1), FEEDBACK),
        (C.none, C.topk(0.1)),
        (C.randomk(0.1), C.randomk(0.1, seed=1)),
        (C.dithering(7), C.dithering(7, normalize="l2")),
        (C.with_momentum(C.int8), C.with_momentum(C.int8, 0.8)),
    ],
    ids=str,
)
def test_other_codecs_are_a_mismatch(codecs: tuple[Any, Any]) -> None:
    def main(rank: int) -> None:
        with pytest.raises(bps.MismatchError, match=r"float32\[3\], compressed to "):
            bps.push_pull(torch.ones(3), name="x", compression=codecs[rank])
        model = optimizer(codecs[rank])
        model.param_groups[0]["params"][0].sum().backward()
        with pytest.raises(bps.MismatchError, match=r"compression=|compressed to"):
            model.step()

    ThreadedCluster(**EVERY).run(main)


def test_small_tensors_travel_as_they_are() -> None:
    """A limit that differs is a mismatch as well: it names what one of them compresses."""

    def main(rank: int) -> None:
        assert bps.push_pull(torch.ones(9), name="small", compression=C.int8 if rank else C.none).tolist() == [1] * 9
        with pytest.raises(bps.MismatchError, match="compressed to int8"):
            bps.push_pull(torch.ones(10), name="large", compression=C.int8 if rank else C.none)

    ThreadedCluster(min_compress_bytes=40).run(main)


def model() -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(30, 4),
            "first": torch.nn.Linear(4, 50),
            "last": torch.nn.Linear(50, 3),
        }
    )


def codecs_of(compression: Any, wrap: Any) -> dict[str, str]:
    """The codec of each parameter's bucket."""
    buckets = wrap(model(), compression).buckets
    return {name: str(bucket.request.spec.codec) for bucket in buckets for name in bucket.names}


def of_optimizer(net: torch.nn.Module, compression: Any) -> Any:
    wrapped = bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters(), compression)
    return wrapped._stepper.reducer


def of_module(net: torch.nn.Module, compression: Any) -> Any:
    return bps.DistributedDataParallel(net, compression=compression)._backward._reducer


@pytest.mark.parametrize("wrap", [of_optimizer, of_module])
def test_rules(wrap: Any) -> None:
    by_rules = C.rules(
        [
            ("*embed*", C.none),
            (lambda name, parameter: parameter.dim() == 1, {"compressor": "onebit"}),
            ("first.*", C.topk(0.1), 800),
            ("last.*", C.topk(0.1), 800),
        ],
        default=C.int8,
    )
    due = {
        "embed.weight": "None",
        "first.weight": "topk of 410 in 4096",
        "first.bias": "onebit",
        "last.weight": "int8",  # 600 bytes
        "last.bias": "onebit",
    }

    def main(rank: int) -> None:
        assert codecs_of(by_rules, wrap) == due
        assert codecs_of(by_rules.choose, wrap) == due
        assert set(codecs_of(C.int8, wrap).values()) == {"int8"}

    ThreadedCluster(**EVERY).run(main)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: C.rules(["*"]), r"a rule is \(where, compression\) or .* not '\*'"),
        (lambda: C.rules([(3, C.int8)]), "a rule begins with a pattern of names"),
        (lambda: C.rules([("*", "int8")]), r"say compression=bps\.Compression\.int8"),
        (lambda: C.rules([("*", C.int8, -1)]), r"rule '\*': bytes are a whole number"),
        (lambda: C.rules([], warmup_steps=-1), "warmup_steps is a number of steps"),
        (lambda: C.with_warmup(C.int8, 1.5), "warmup_steps is a number of steps, 0 or more, not 1.5"),
        (lambda: optimizer(C.topk), r"bps\.Compression\.topk is a function: call it"),
        (lambda: optimizer(lambda name, parameter: "int8"), "parameter 'w': compression must be one of"),
        (
            lambda: optimizer(C.rules([("w", C.int8)]), torch.ones(2, dtype=torch.float64)),
            "tensor 'w': .* not for float64",
        ),
        (lambda: optimizer(C.rules([("w", C.int8)]), op=bps.Max), "compression int8 is for op=Average and op=Sum"),
        (lambda: optimizer(C.rules([("w", C.int8)]), op=bps.Adasum), "by rules is not for op=Adasum"),
        (
            lambda: optimizer(C.rules([("w", C.topk(0.1))], C.int8), hosted=True),
            "with a hosted optimizer needs hosted='machine'",
        ),
        (lambda: bps.push_pull(torch.ones(2), name="x", compression=C.rules([])), "is for DistributedOptimizer"),
    ],
)
def test_rules_that_are_refused(make: Any, said: str) -> None:
    def main(rank: int) -> None:
        with pytest.raises(bps.UsageError, match=said):
            make()
        optimizer(C.rules([("other", C.int8)]), hosted=True)

    ThreadedCluster().run(main)


def test_warm_up() -> None:
    """Codecs come into use after so many steps; steps are counted on, also in errors about them."""

    def main(rank: int) -> None:
        wrapped = optimizer(C.with_warmup(C.int8, 2))
        parameter = wrapped.param_groups[0]["params"][0]
        (bucket,) = wrapped._stepper.reducer.buckets
        for step in range(1, 6):
            parameter.sum().backward()
            wrapped.step()
            wrapped.zero_grad()
            assert (bucket.request.spec.codec is None) == (step <= 2)
            assert bucket.slot_view.slot.spec.codec is bucket.request.spec.codec
            assert bucket.round == step
        assert torch.allclose(parameter.data, torch.full((5,), 0.5))

    ThreadedCluster(**EVERY).run(main)


def test_a_warm_up_begins_again_with_a_new_group() -> None:
    """Ranks that join know nothing of the steps before: the others do in their second life as in their first."""

    def main(rank: int) -> None:
        wrapped = optimizer(C.with_warmup(C.int8, 1))
        parameter = wrapped.param_groups[0]["params"][0]
        (bucket,) = wrapped._stepper.reducer.buckets
        for life in range(2):
            if life:
                bps.shutdown()
                bps.init()
            for step in range(1, 4):
                parameter.sum().backward()
                wrapped.step()
                wrapped.zero_grad()
                assert (bucket.request.spec.codec is None) == (step == 1)
                assert bucket.round == step

    ThreadedCluster(**EVERY).run(main)


def test_other_warm_ups_are_a_mismatch() -> None:
    def main(rank: int) -> None:
        wrapped = optimizer(C.with_warmup(C.int8, 2 + rank))
        wrapped.param_groups[0]["params"][0].sum().backward()
        with pytest.raises(bps.MismatchError, match="after 2 steps"):
            wrapped.step()

    ThreadedCluster(**EVERY).run(main)


def test_a_warm_up_with_restarts() -> None:
    """Without a shadow all ranks are started again."""
    ThreadedCluster(elastic=True, max_restarts=1).run(lambda rank: optimizer(C.with_warmup(FEEDBACK, 2)))
