"""The papers' formulas, with the papers' numbers."""

from __future__ import annotations

import pytest
from support.paper_formulas import (
    first_stage_layers,
    gpt_parameters,
    gpt_step_flops,
    pipeline_hop_words,
    tensor_parallel_words,
)

from byteps_py.errors import UsageError
from byteps_py.tools.plan.formulas import activation_bytes, state_bytes, state_traffic


@pytest.mark.parametrize(
    ("mode", "mib"), [("none", 6752), ("tensor", 1264), ("sequence", 844), ("selective", 204), ("full", 96)]
)
def test_activations_of_the_22b_model(mode: str, mib: int) -> None:
    assert activation_bytes(2048, 4, 6144, 64, 8, mode) / 2**20 == mib  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "tensor_gib", "selective_gib"),
    [  # layers, hidden, heads, micro-batch, workers, chunks
        ((48, 6144, 64, 4, 1, 1), 59.25, 9.5625),
        ((96, 12288, 96, 1, 8, 3), 66.84375, 12.3515625),
        ((105, 20480, 128, 1, 35, 3), 114.0234375, 23.076171875),
        ((128, 25600, 160, 1, 64, 1), 131.25, 26.5625),
    ],
)
def test_activations_of_a_first_stage(shape: tuple[int, ...], tensor_gib: float, selective_gib: float) -> None:
    """Korthikanti et al., 2022, figure 1: models of 22, 175, 530 and 1,000 billion parameters; the numbers are those by
    which Calculon was validated. Its own mean error is 2.08 %."""
    layers, hidden, heads, micro_batch, workers, chunks = shape
    held = first_stage_layers(layers, workers, chunks)
    for mode, gib in (("tensor", tensor_gib), ("selective", selective_gib)):
        each = activation_bytes(2048, micro_batch, hidden, heads, 8, mode)  # type: ignore[arg-type]
        assert held * each / 2**30 == pytest.approx(gib, rel=0.001)


def test_one_rank_keeps_the_same_with_any_parallelism() -> None:
    found = {mode: activation_bytes(512, 2, 1024, 16, 1, mode) for mode in ("none", "tensor", "sequence")}  # type: ignore[arg-type]
    assert len(set(found.values())) == 1, found


def test_words_between_ranks() -> None:
    assert round(tensor_parallel_words(1, 2048, 12288, 8) / 1e6, 2) == 176.16
    assert round(pipeline_hop_words(1, 2048, 12288) / 1e6, 2) == 25.17
    assert tensor_parallel_words(1, 2048, 12288, 1) == 0


@pytest.mark.parametrize(("stage", "gb"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_states_of_a_model_of_7_5_b(stage: int, gb: float) -> None:
    assert float(f"{state_bytes(7.5e9, 64, stage) / 1e9:.3g}") == gb
    assert state_bytes(7.5e9, 1, stage) == 120e9


def test_traffic_of_states() -> None:
    assert [state_traffic(1, stage) for stage in range(4)] == [2, 2, 2, 3]


def test_parameters_are_those_of_the_parts() -> None:
    """12h² + 13h of each layer (with biases and norms), and the embeddings of tokens and positions."""
    layers, hidden, vocabulary, sequence = 96, 12288, 51200, 2048
    counted = layers * (12 * hidden**2 + 13 * hidden) + (vocabulary + sequence) * hidden
    assert gpt_parameters(layers, hidden, vocabulary, sequence) == pytest.approx(counted, rel=1e-12)


def test_flops_of_a_step() -> None:
    """The paper's form, and the sum over matrix products: 72 or 96 times b·s·l·h², scores, and the head."""
    b, s, layers, h, v = 1536, 2048, 96, 12288, 51200
    paper = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert gpt_step_flops(b, s, layers, h, v) == pytest.approx(paper, rel=1e-12)
    products = 3 * (layers * (24 * b * s * h**2 + 4 * b * s**2 * h) + 2 * b * s * h * v)
    assert gpt_step_flops(b, s, layers, h, v, recomputes=False) == pytest.approx(products, rel=1e-12)


def test_unknown_modes_and_stages() -> None:
    with pytest.raises(UsageError, match=r"mode='half'.*selective"):
        activation_bytes(1, 1, 1, 1, 1, "half")  # type: ignore[arg-type]
    for function in (state_bytes, state_traffic):
        with pytest.raises(UsageError, match="zero_stage=4"):
            function(1.0, zero_stage=4)
