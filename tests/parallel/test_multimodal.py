"""Multimodal training: gradients of image tokens, the encoder's share of a step, and training on real processes beside
one process (programs/multimodal_training.py)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.breaking import command
from support.clusters import ROOT, clean_environment
from torch import nn

from byteps_py.errors import UsageError
from byteps_py.parallel.multimodal import EncoderPlacement, MultimodalModel, encoder_share, step_time
from byteps_py.parallel.multimodal.model import EncodedImages, apply_layers, checked_tokens, count_images
from byteps_py.parallel.pipe.schedules import make
from byteps_py.parallel.pipe.simulator import Durations

PROGRAM = str(ROOT / "tests" / "programs" / "multimodal_training.py")
EXAMPLE = str(ROOT / "examples" / "multimodal.py")
SHARES = [EncoderPlacement.FIRST_STAGE, EncoderPlacement.PREPROCESSING, EncoderPlacement.REPLICATED]


def launch(ranks: int, *words: str) -> list[str]:
    return [sys.executable, "-m", "byteps_py.launch", "-np", str(ranks), sys.executable, *words]


# ---- on real processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "copies", "cases"),
    [
        pytest.param(2, 1, "equal raises refused", marks=pytest.mark.slow),
        pytest.param(2, 1, "low_precision frozen_encoder checkpoints", marks=pytest.mark.slow),
        pytest.param(4, 2, "equal raises", marks=pytest.mark.slow),
        pytest.param(4, 1, "frozen_encoder checkpoints", marks=pytest.mark.long),
        pytest.param(4, 1, "equal raises refused low_precision", marks=pytest.mark.long),
        pytest.param(4, 2, "refused low_precision frozen_encoder checkpoints", marks=pytest.mark.long),
        pytest.param(1, 1, "raises frozen_encoder", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(300)
def test_beside_one_process(ranks: int, copies: int, cases: str) -> None:
    arguments = launch(ranks, PROGRAM, str(copies), *cases.split())
    with command(*arguments, PYTHONWARNINGS="default", OMP_NUM_THREADS="1") as job:
        assert job.end() == 0, job.text
    for case in cases.split():
        assert job.text.count(f"{case}: right") == ranks, job.text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_on_gloo() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", PROGRAM, "1", "equal", "raises"]
    with command(*torchrun, OMP_NUM_THREADS="1", TEST_BACKEND="gloo") as job:
        assert job.end() == 0, job.text
    assert job.text.count("equal: right") == job.text.count("raises: right") == 2, job.text


@pytest.mark.parametrize(
    "placement",
    ["replicated", *(pytest.param(one, marks=pytest.mark.long) for one in ("preprocessing", "first-stage"))],
)
@pytest.mark.timeout(180)
@pytest.mark.slow
def test_the_example(placement: str) -> None:
    small = ["--steps", "4", "--text-steps", "3", "--batch-size", "8", "--width", "16", "--groups", "2", "--check"]
    with command(*launch(2, EXAMPLE, "--placement", placement, *small), OMP_NUM_THREADS="1") as job:
        assert job.end() == 0, job.text
    assert re.findall(r"step +(\d+)  loss [\d.]+ ", job.text) == ["1", "2", "3", "4"], job.text
    assert "the losses of 4 steps and those of one process: equal to 0.0001" in job.text, job.text


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_benchmark_measures_every_placement(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    options = ["--workers", "2", "--micro-batches", "2", "--rounds", "2", "--steps", "1", "--kb", "1"]
    options += ["--forward-ms", "10", "--backward-ms", "20", "--encoder-forward-ms", "7", "--encoder-backward-ms", "14"]
    words = [sys.executable, "-m", "benchmarks.multimodal", *options, "--json", str(result)]
    ran = subprocess.run(
        words, cwd=ROOT, env=clean_environment(), timeout=280, check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    rows: list[dict[str, Any]] = json.loads(result.read_text())
    assert [row["encoder"] for row in rows] == ["none", "first-stage", "preprocessing", "replicated"]
    # No prediction is below the waits: 10 + 20 ms of the text model, 7 + 14 ms of the encoder, m = p = 2.
    for row, least_s in zip(rows, (0.09, 0.125, 0.132, 0.111), strict=True):
        assert min(row["rounds_s"]) > 0
        assert row["predicted_s"] >= least_s
        assert len(row["shares"]) == 2
        (line,) = [line for line in ran.stdout.splitlines() if line.startswith(row["encoder"])]
        assert f"{row['share']:.1%}" in line


# ---- the encoder's share of a step -------------------------------------------------------------------------


def test_steps_of_all_placements() -> None:
    """p = 4, m = 8, forward 1, backward 2: 33; the encoder takes 8 · 2 = 16 in all."""
    program, encoder = make("dapple", 4, 8), Durations(1, 1)
    assert step_time(program, Durations()) == 33
    # Worker 0 is busy for 8 · 5; it waits for its first gradient at 2 + 3 · 3 = 11, from 4 · 2 = 8 on.
    assert [step_time(program, Durations(), encoder, each) for each in SHARES] == [43, 33 + 16, 33 + 16 / 4]
    assert encoder_share(program, Durations(), encoder, EncoderPlacement.PREPROCESSING) == pytest.approx(16 / 49)
    assert encoder_share(program, Durations(), encoder, EncoderPlacement.REPLICATED) == pytest.approx(4 / 37)


@pytest.mark.parametrize("schedule", ["gpipe", "dapple", "interleaved", "chimera"])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_replicas_take_the_least(schedule: str, p: int) -> None:
    options = {"chunks": 2} if schedule == "interleaved" else {}
    program = make(schedule, p, 2 * p, **options)
    first, before, replicated = (encoder_share(program, Durations(), Durations(0.5, 1), each) for each in SHARES)
    # Chimera with two workers has the first stage on both.
    assert replicated == pytest.approx(first) if (schedule, p) == ("chimera", 2) else replicated < first
    assert first <= before


def test_a_share_of_a_third_becomes_a_ninth_with_four_workers() -> None:
    program = make("dapple", 4, 4)
    encoder = Durations(21 / 24, 42 / 24)  # 10.5 in all, half of 21
    assert encoder_share(program, Durations(), encoder, EncoderPlacement.PREPROCESSING) == pytest.approx(1 / 3)
    assert encoder_share(program, Durations(), encoder, EncoderPlacement.REPLICATED) == pytest.approx(1 / 9)


# ---- gradients of image tokens -----------------------------------------------------------------------------


class Attending(nn.Module):
    """Adds to the text. So the gradient of each layer's output is that of the text."""

    attends_to_images = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False, dtype=dtype)

    def forward(self, text: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return text + self.linear(tokens).mean(1)


@pytest.mark.parametrize("is_autocast", [False, True])
def test_gradients_of_many_layers_are_summed_in_float32(is_autocast: bool) -> None:
    """Each layer's gradient is that of bfloat16; the sum of 48 of them has no further error."""
    torch.manual_seed(0)
    dtype = torch.float32 if is_autocast else torch.bfloat16
    layers = [Attending(dtype) for _ in range(48)]
    values, text = torch.randn(4, 3, 16).bfloat16(), torch.randn(4, 16, dtype=dtype)

    def gradient(leaf: torch.Tensor, summed_by: Any, some: list[Attending]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            output = summed_by(some, leaf)
        output.backward(torch.ones_like(output))
        assert leaf.grad is not None
        return leaf.grad.double()

    def ours(some: list[Attending], leaf: torch.Tensor) -> torch.Tensor:
        return apply_layers(some, text, lambda: leaf)  # type: ignore[no-any-return]

    def plainly(some: list[Attending], leaf: torch.Tensor) -> torch.Tensor:
        result = text
        for layer in some:
            result = layer(result, leaf)
        return result

    exact = sum(gradient(values.float().requires_grad_(), ours, [layer]) for layer in layers)
    encoded = EncodedImages()
    encoded.hold(values, 1, requires_grad=True)
    error = (gradient(encoded.tokens(0), ours, layers) - exact).abs().max()
    plain = values.float() if is_autocast else values.clone()
    error_of_plain = (gradient(plain.requires_grad_(), plainly, layers) - exact).abs().max()
    assert error < 1e-5, error
    assert error_of_plain > 1e-3, error_of_plain
    assert encoded.gradients.dtype is torch.float32


def test_parts_of_the_images_share_one_tensor_of_gradients() -> None:
    encoded = EncodedImages()
    encoded.hold(torch.arange(6.0).view(6, 1), 3, requires_grad=True)
    (encoded.tokens(1) * 2).sum().backward()
    (encoded.tokens(1) * 3).sum().backward()
    (encoded.tokens(2) * 7).sum().backward()
    assert encoded.gradients.flatten().tolist() == [0, 0, 5, 5, 7, 7]
    encoded.hold(torch.zeros(3, 1, dtype=torch.float64), 3, requires_grad=False)
    assert encoded.tokens(0).dtype is torch.float64
    assert not encoded.tokens(0).requires_grad


def test_tokens_and_gradients_that_are_not_there() -> None:
    encoded = EncodedImages()
    with pytest.raises(
        UsageError, match="tokens of part 0 are asked for, but no images are encoded: encode the images"
    ):
        encoded.tokens(0)
    with pytest.raises(UsageError, match="gradients of image tokens are asked for, but no images are held"):
        _ = encoded.gradients
    encoded.hold(torch.zeros(4, 2), 2, requires_grad=False)
    with pytest.raises(UsageError, match="part 2 are asked for, but those of 2 parts are there"):
        encoded.tokens(2)
    with pytest.raises(UsageError, match="no images are held that require them"):
        _ = encoded.gradients
    with pytest.raises(UsageError, match="4 images can't be cut into 3 equal parts"):
        encoded.hold(torch.zeros(4, 2), 3, requires_grad=True)
    encoded.drop()
    with pytest.raises(UsageError, match="no images are encoded"):
        encoded.tokens(0)


# ---- the model ---------------------------------------------------------------------------------------------


def test_bad_models_and_images() -> None:
    with pytest.raises(UsageError, match="no layer of the text model attends to images; its layers: 0, 1"):
        MultimodalModel(nn.Identity(), nn.Sequential(nn.ReLU(), nn.ReLU()))
    with pytest.raises(UsageError, match=r"\(3, 2\) for 4 images"):
        checked_tokens(torch.zeros(3, 2), torch.zeros(4, 8))
    with pytest.raises(UsageError, match=r"images are \[4, 3\]"):
        count_images({"pixels": torch.zeros(4, 8), "sizes": torch.zeros(3)})
    with pytest.raises(UsageError, match=r"images are \[\]"):
        count_images(None)
    with pytest.raises(UsageError, match=r"choose one of 'first-stage', 'preprocessing', 'replicated'"):
        EncoderPlacement.of("last")


def test_stages_have_the_names_of_the_model_and_pass_images_on_as_far_as_they_are_needed() -> None:
    text = nn.Sequential(nn.Linear(16, 16), Attending(torch.float32), nn.ReLU(), nn.Linear(16, 16))
    model = MultimodalModel(nn.Linear(8, 16), text)
    for placement in EncoderPlacement:
        encoded = EncodedImages()
        stages = model.stages(4, placement, encoded)
        names = [name for stage in stages for name, _ in stage.named_parameters()]
        assert names == [
            name
            for name, _ in model.named_parameters()
            if placement is EncoderPlacement.FIRST_STAGE or not name.startswith("encoder.")
        ]
        images, value = torch.randn(2, 3, 8), torch.randn(2, 16)
        expected = model((images, value))
        encoded.hold(model.encoder(images), 1, requires_grad=True)
        passed: Any = (value, images if placement is EncoderPlacement.FIRST_STAGE else torch.tensor(0))
        lengths = []
        for stage in stages[:-1]:
            passed = stage(passed)
            lengths.append(len(passed))
        assert lengths == [2, 1, 1]
        assert torch.equal(stages[-1](passed), expected)
