"""Sizes of meshes: Llama 3's own, and properties of all that are found."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from byteps_py.errors import UsageError
from byteps_py.tools.plan.sizing import SizeOptions, SizePlan, parse_count, plan_size
from byteps_py.tools.plan.sizing_job import (
    MODELS,
    MeshSizes,
    ModelShape,
    known_model,
    load_model,
    memory_need,
    stage_layers,
)

BATCH = 2**24
SHAPE = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 512, "vocabulary": 1000}


def sizes_of(plan: SizePlan) -> tuple[int, int, int, int]:
    return plan.tp, plan.cp, plan.pp, plan.dp


# ---- Llama 3 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequence", "sizes", "cp_reason"),
    [(8192, (8, 1, 16, 128), "b ≥ pp without it"), (131072, (8, 16, 16, 8), "needs cp ≥ 16")],
)
def test_llama_3_on_16384_gpus(sequence: int, sizes: tuple[int, ...], cp_reason: str) -> None:
    """Table 2 and section 5.1 of the paper, with its numbers."""
    plan = plan_size(16384, BATCH, sequence, "llama3-405b")
    assert sizes_of(plan) == sizes
    tp, cp, zero_3, pp, dp, zero = plan.reasons
    assert "tp ≥ 8" in tp
    assert cp_reason in cp
    assert "8,192 FLOPs for each byte" in zero_3
    assert "19,780" in zero_3
    assert pp.startswith("pp 16: ")
    assert dp.startswith(f"dp {sizes[3]}: ")
    assert "ZeRO-2" in zero
    assert "b = 16 < 2·pp = 32" in zero


def test_the_sizes_follow_from_the_numbers() -> None:
    """Other numbers, other sizes: each rule has its effect."""
    roomy = plan_size(16384, BATCH, 8192, "llama3-405b", SizeOptions(memory_bytes=160e9))
    assert roomy.tp == 8
    assert roomy.pp < 16
    fast = plan_size(16384, BATCH, 8192, "llama3-405b", SizeOptions(network_bytes_per_s=400e9))
    assert (fast.pp, fast.sizes.zero_stage) == (1, 3)
    twice = plan_size(16384, 2 * BATCH, 8192, "llama3-405b")
    assert twice.sizes.batch >= 2 * twice.pp
    assert twice.sizes.zero_stage == 1
    assert "1F1B" in twice.reasons[-1]
    wide = plan_size(16384, BATCH, 131072, "llama3-405b", SizeOptions(gpus_per_machine=16))
    assert (wide.tp, wide.cp) == (16, 8)
    assert wide.tp * wide.cp == 128


@pytest.mark.parametrize(
    ("model", "gpus", "sizes", "stage"),
    [
        ("llama3-8b", 8, (1, 1, 1, 8), 3),
        ("llama3-8b", 64, (1, 1, 1, 64), 1),
        ("llama3-8b", 512, (1, 1, 1, 512), 1),
        ("llama3-70b", 64, (4, 1, 4, 4), 1),
        ("llama3-70b", 512, (4, 1, 4, 32), 1),
    ],
)
def test_smaller_jobs(model: str, gpus: int, sizes: tuple[int, ...], stage: int) -> None:
    """Small models need no pipeline; on one machine, NVLink is fast enough for ZeRO-3."""
    plan = plan_size(gpus, BATCH, 8192, model)
    assert (sizes_of(plan), plan.sizes.zero_stage) == (sizes, stage)


@pytest.mark.parametrize(
    ("model", "gpus", "fewest"), [("llama3-8b", 1, 2), ("llama3-70b", 8, 15), ("llama3-405b", 64, 82)]
)
def test_nothing_fits(model: str, gpus: int, fewest: int) -> None:
    """The states alone have 16 bytes for each parameter."""
    with pytest.raises(
        UsageError, match=f"nothing fits on {gpus} GPU.* needs .* GB .*at least {fewest} GPUs"
    ) as caught:
        plan_size(gpus, BATCH, 8192, model)
    assert f"{known_model(model).parameters:,}" in str(caught.value)


def test_one_gpu() -> None:
    plan = plan_size(1, 8192, 1024, ModelShape(**SHAPE))
    assert sizes_of(plan) == (1, 1, 1, 1)
    assert plan.sizes.batch == 8


def test_long_sequences_need_recomputation_or_cp() -> None:
    plan = plan_size(8, BATCH, 131072, "llama3-8b")
    assert plan.sizes.recomputation == "full"
    assert "Recomputation" in plan.reasons[-1]
    plan = plan_size(2048, BATCH, 131072, "llama3-8b")
    assert (plan.cp, plan.sizes.recomputation) == (2, "selective")
    assert "needs cp ≥ 2" in plan.reasons[1]
    plan = plan_size(512, BATCH, 8192, "llama3-405b")
    assert plan.cp == 2
    assert "divides the activations" in plan.reasons[1]


def test_transfers_that_nothing_hides() -> None:
    """One sequence for all GPUs: no pipeline, and too few tokens for each byte."""
    plan = plan_size(16384, 2**20, 2**20, "llama3-405b")
    assert plan.sizes.zero_stage == 3
    assert "waits for transfers" in plan.reasons[-1]


# ---- properties ------------------------------------------------------------------------------------------------


def random_jobs(count: int) -> list[tuple[int, int, int, str, SizeOptions]]:
    rng = random.Random(3)
    jobs = []
    for _ in range(count):
        machine = rng.choice([1, 2, 4, 6, 8, 16])
        gpus = machine * rng.choice([1, 2, 3, 4, 7, 16, 64, 100, 512, 2048])
        sequence = rng.choice([1000, 2048, 8192, 32768, 131072])
        tokens = sequence * rng.choice([1, 8, 96, 128, 2048, 4200])
        options = SizeOptions(machine, rng.choice([24e9, 80e9, 192e9]))
        jobs.append((gpus, tokens, sequence, rng.choice(list(MODELS)), options))
    return jobs


def test_properties_of_random_jobs() -> None:
    found, refused = 0, []
    for gpus, tokens, sequence, name, options in random_jobs(400):
        job, model = (gpus, tokens, sequence, name, options), MODELS[name]
        try:
            plan = plan_size(*job)
        except UsageError as error:
            refused.append(str(error))
            continue
        found += 1
        sizes = plan.sizes
        assert plan.tp * plan.cp * plan.pp * plan.dp == gpus, job
        assert min(options.gpus_per_machine, gpus) % plan.tp == 0, job
        assert model.heads % plan.tp == 0, job
        assert plan.cp == 1 or sequence % (2 * plan.cp) == 0, job
        assert sizes.batch * plan.dp == tokens // sequence, job
        assert sizes.batch >= plan.pp, job
        assert plan.pp <= model.layers, job
        assert plan.memory == memory_need(model, sequence, sizes), job
        assert plan.memory.total <= options.memory_bytes, job
        assert sizes.zero_stage == 3 or (sizes.zero_stage == 1) == (sizes.batch >= 2 * plan.pp), job
        for name, size, reason in zip(("tp", "cp"), (plan.tp, plan.cp), plan.reasons, strict=False):
            assert reason.startswith(f"{name} {size}: "), job
        assert all("inf" not in reason and "nan" not in reason for reason in plan.reasons), job
    assert found > 100
    kinds = {kind: sum(kind in text for text in refused) for kind in ("nothing fits", "too small", "no division")}
    assert all(kinds.values()), kinds
    assert sum(kinds.values()) == len(refused)
    assert all(text.count(" GB") >= 4 for text in refused if "nothing fits" in text)


def test_more_memory_never_needs_more_recomputation() -> None:
    for name, gpus, sequence in itertools.product(MODELS, (64, 512, 4096), (8192, 131072)):
        modes = []
        for memory in (40e9, 80e9, 160e9, 320e9):
            try:
                modes.append(
                    plan_size(gpus, BATCH, sequence, name, SizeOptions(memory_bytes=memory)).sizes.recomputation
                )
            except UsageError:
                modes.append("nothing")
        assert modes == sorted(modes, key=["nothing", "full", "selective"].index), (name, gpus, sequence, modes)


# ---- memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "pp"), [(126, 16), (32, 1), (32, 2), (80, 4), (10, 8), (5, 5), (32, 12), (7, 3)])
def test_stages_hold_all_layers(layers: int, pp: int) -> None:
    outer, inner = stage_layers(layers, pp)
    assert outer <= inner
    assert (pp if pp < 3 else 2) * outer + max(0, pp - 2) * inner >= layers


def test_memory_by_hand() -> None:
    """A tiny model, term by term. One layer has 34 bytes a value; logits are float32."""
    model = ModelShape(**SHAPE)
    layer, embedding, kept, logits = model.layer_parameters, 256_000, 34 * 64 * 256, 4 * 64 * 1000
    need = memory_need(model, 64, MeshSizes(1, 1, 1, 4, 8))
    assert need.states == (4 + 12 / 4) * (4 * layer + 2 * embedding)
    assert need.activations == 4 * kept + logits
    first = memory_need(model, 64, MeshSizes(2, 2, 2, 2, 8))
    assert first.states == (4 + 12 / 4) * (2 * layer + embedding) / 2
    assert first.activations == 2 * 2 * kept / 4  # two micro-batches in flight, of two layers
    whole = memory_need(model, 64, MeshSizes(2, 1, 2, 2, 3, zero_stage=2))
    assert whole.states == (2 + 14 / 2) * (2 * layer + embedding) / 2
    assert whole.activations == 3 * (2 * kept + logits) / 2  # the last worker, with all three in flight
    full = memory_need(model, 64, MeshSizes(2, 1, 1, 2, 4, micro_batch=2, zero_stage=3, recomputation="full"))
    assert full.states == 16 / 2 * (4 * layer + 2 * embedding) / 2 + 6 * layer / 2
    assert full.activations == (4 * 2 * 64 * 256 + kept + logits) * 2 / 2


def test_llama_3_takes_a_layer_from_the_first_and_the_last_stage() -> None:
    assert stage_layers(126, 16) == (7, 8)


# ---- models and numbers ----------------------------------------------------------------------------------------


def test_parameters_of_llama_3() -> None:
    assert [MODELS[name].parameters for name in MODELS] == [8_030_261_248, 70_553_706_496, 405_853_388_800]


def test_a_model_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(SHAPE))
    assert load_model(str(path)) == ModelShape(**SHAPE)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "is not JSON"),
        ("[1]", "has a list"),
        (json.dumps({**SHAPE, "ffn": "x"}), "ffn='x'"),
        (json.dumps({**SHAPE, "layers": 0}), "layers=0"),
        (json.dumps({**SHAPE, "heads": 3}), "hidden=256 is not a multiple of heads=3"),
        (json.dumps({**SHAPE, "kv_heads": 3}), "heads=4 is not a multiple of kv_heads=3"),
        (json.dumps({**SHAPE, "experts": 8}), "'experts'"),
        (json.dumps({key: value for key, value in SHAPE.items() if key != "ffn"}), "lacks ffn"),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"model\.json") as caught:
        load_model(str(path))
    assert text in str(caught.value)


def test_unknown_models() -> None:
    with pytest.raises(UsageError, match="unknown model 'gpt5': known models are llama3-8b, llama3-70b, llama3-405b"):
        load_model("gpt5")
    with pytest.raises(UsageError, match="No such file"):
        load_model("./nothing.json")


@pytest.mark.parametrize(("text", "count"), [("16M", 2**24), ("8k", 8192), (" 1G ", 2**30), ("1.5K", 1536), ("7", 7)])
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "K", "0", "-1", "1.5", "8 K", "1e6", "16MB", "0.0001K", "٣"])
def test_no_counts(text: str) -> None:
    with pytest.raises(UsageError, match="whole number"):
        parse_count(text)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"gpus": 12}, "12 GPUs are no multiple of the 8 of a machine: use 8 or 16 GPUs"),
        ({"gpus": 0}, "gpus=0"),
        ({"sequence": 134144}, "use 16768000 or 16902144 tokens.*131072 is 128K"),
        ({"batch_tokens": 100}, "at least 8192"),
        ({"gpus": 2**24, "batch_tokens": 8192}, "1 sequence of 8192 tokens is too small"),
        ({"gpus": 8 * 127}, "a multiple of 127 sequences"),
        ({"options": {"gpus_per_machine": 0}}, "gpus_per_machine=0"),
        ({"options": {"memory_bytes": float("nan")}}, "memory_bytes=nan"),
    ],
    ids=str,
)
def test_numbers_that_do_not_go_together(changed: dict[str, Any], text: str) -> None:
    arguments = {"gpus": 64, "batch_tokens": BATCH, "sequence": 8192, "model": "llama3-8b", **changed}
    with pytest.raises(UsageError, match=text):
        plan_size(**{**arguments, "options": SizeOptions(**arguments.get("options", {}))})
