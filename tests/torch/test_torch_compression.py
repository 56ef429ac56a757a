"""What ``compression`` arguments mean, and what is refused, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.threaded import ThreadedCluster

import byteps_py.torch as bps
from byteps_py.torch.compression import compression_of

C = bps.Compression
EVERY = {"min_compress_bytes": 0}


def test_dictionaries_of_byteps() -> None:
    for choice, same in [
        ({"compressor": "topk", "k": 0.01}, C.topk(0.01)),
        ({"compressor": "topk", "k": "0.5", "ef": "vanilla"}, C.topk(0.5, error_feedback=True)),
        (C.bf16, C.bf16),
    ]:
        assert compression_of(choice) is same


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"compressor": "onebit", "scaling": True}, "the compressor 'onebit' of .* is not here; topk is"),
        ({"compressor": "randomk", "k": 1, "seed": 2}, "the compressor 'randomk'"),
        ({"k": 0.1}, "the compressor None"),
        ({"compressor": "topk", "k": 0.1, "momentum": "nesterov", "mu": 0.9}, "'momentum', 'mu' of .* is not here"),
        ({"compressor": "topk", "k": 0.1, "ef": "corrected"}, "ef='corrected'"),
        ({"compressor": "topk", "k": 1}, "k=1 of .* a number of elements"),
        ({"compressor": "topk", "k": 64}, "k=64 of .* a number of elements, perhaps more than a tensor has"),
        ({"compressor": "topk", "k": 0}, "a share above 0 and up to 1"),
        ({"compressor": "topk", "k": "many"}, "k='many' of .* is no number"),
        ({"compressor": "topk"}, "k=None"),
        ("int8", r"say compression=bps\.Compression\.int8"),
        (None, "got None"),
    ],
)
def test_what_compression_is_not(choice: Any, said: str) -> None:
    with pytest.raises(bps.UsageError, match=said):
        compression_of(choice)


def test_error_feedback_needs_a_codec() -> None:
    with pytest.raises(bps.UsageError, match="for int8, float8 and topk, not for FP16Compressor"):
        C.with_error_feedback(C.fp16)
    assert C.with_error_feedback(C.topk(0.1)) is C.topk(0.1, error_feedback=True)


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
    "hosted": (lambda: optimizer(INT8, hosted=True), "not for hosted optimizers .* use hosted=False"),
    "shadow": (lambda: optimizer(INT8, shadow=True), r"not for hosted optimizers \(hosted=, shadow=True"),
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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nonfinite": "skip"}, "can't be had with BYTEPS_NONFINITE=skip: .* or BYTEPS_NONFINITE=raise"),
        ({"elastic": True}, "can't be had in an elastic job"),
    ],
)
def test_error_feedback_is_refused(settings: dict[str, Any], said: str) -> None:
    def main(rank: int) -> None:
        with pytest.raises(bps.UsageError, match=said):
            optimizer(FEEDBACK)
        optimizer(INT8)

    ThreadedCluster(**settings).run(main)


@pytest.mark.parametrize("codecs", [(C.int8, C.float8), (C.topk(0.1), FEEDBACK), (C.none, C.topk(0.1))], ids=str)
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
