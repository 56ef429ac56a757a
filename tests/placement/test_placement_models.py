"""Placement of real models, and of a user's own list of shapes."""

from __future__ import annotations

import importlib.util
import math
from fractions import Fraction
from pathlib import Path

import pytest
from support.placement import MB, model_table

from byteps_py.errors import ConfigurationError
from byteps_py.placement.placement_plan import entries, known_models, load_model, plain_hash_plan, plan, read_shapes
from byteps_py.tensors import key_of, split

# ---- real models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [
        ("resnet50", 161, 25_557_032),
        ("vgg16", 32, 138_357_544),
        ("bert-large", 391, 335_141_888),
        ("gpt2", 148, 124_439_808),
        ("resnet101", 314, 44_549_160),
    ],
)
def test_models_have_their_published_sizes(model, tensors, parameters):
    shapes = load_model(model)
    assert len(shapes) == tensors
    assert sum(math.prod(shape) for _, shape in shapes) == parameters
    assert len({key_of(name) for name, _ in shapes}) == tensors


def test_models_file_is_what_its_generator_writes():
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("models_generator", root / "benchmarks" / "models.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert (root / "byteps_py" / "placement" / "models.json").read_text() == generator.text()


GRID = [(n, k) for n in (2, 3, 4, 7, 8, 16, 31, 48, 64) for k in sorted({0, 1, n // 4, n // 2, n - 1, n, n + 3})]


@pytest.mark.parametrize("model", known_models())
def test_real_models_are_even_on_every_cluster(model):
    tensors = entries(load_model(model))
    nbytes = sum(t.nbytes for t in tensors)
    for n, k in GRID:
        ours = plan(tensors, n, k, 4 * MB)
        assert sum(ours.held) == nbytes, (n, k)
        assert all(bool(held) == bool(weight) for held, weight in zip(ours.held, ours.optimum.weights, strict=True))
        assert ours.time_over_optimum <= 1.02, (n, k)
        assert ours.fullest <= 1.02, (n, k)
        uncut = sum(len(split(t.nbytes, 4 * MB, 4)) for t in tensors)
        assert ours.partitions <= uncut + 2 * len(ours.optimum.server_weights), (n, k)


@pytest.mark.parametrize("model", known_models())
def test_bounded_loads_beat_plain_hash(model):
    tensors = entries(load_model(model))
    for n, k in GRID:
        ours, plain = plan(tensors, n, k, 4 * MB), plain_hash_plan(tensors, n, k, 4 * MB)
        assert ours.time_over_optimum <= plain.time_over_optimum * Fraction(1001, 1000), (n, k)  # rounding
    one = [t for t in tensors if t.nbytes >= MB][:1]  # what is smaller is hardly cut
    few = plan(one, 8, 4, 4 * MB), plain_hash_plan(one, 8, 4, 4 * MB)
    assert few[0].fullest < few[1].fullest


def test_partitions_of_a_large_cluster_hold_no_more_than_asked():
    for partition_bytes in (64 << 10, 1 << 20):
        table = model_table("resnet50", 64, 32, partition_bytes)
        parts = [p for t in entries(load_model("resnet50")) for p in table.partitions(t.key)]
        assert max(p.length for p in parts) <= partition_bytes


# ---- a user's own list -------------------------------------------------------------------------------------


def test_shapes_are_read(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text('[["w", [3, 4]], ["scale", []]]')
    assert read_shapes(str(path)) == [("w", (3, 4)), ("scale", ())]
    assert entries(read_shapes(str(path)), 2) == [(key_of("w"), 24, 2), (key_of("scale"), 2, 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('[["w\\ud800", [1]]]', "row 1 must be a name"),
        ("{}", "list of"),
        ("[]", "no elements"),
        ('[["w", [0]]]', "no elements"),
        ('[["w", [1]], ["w", [2]]]', "'w' is listed twice"),
        ('[["w", [1]], ["v", [-1]]]', "row 2"),
        ('[["w", [true]]]', "row 1"),
        ('[["w"]]', "row 1"),
        ("[[1, [2]]]", "row 1"),
    ],
)
def test_malformed_shapes_are_refused(tmp_path, text, message):
    path = tmp_path / "shapes.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_shapes(str(path))


def test_missing_files_and_models_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"nothing\.json can't be read"):
        read_shapes(str(tmp_path / "nothing.json"))
    with pytest.raises(ConfigurationError, match="resnet50, vgg16, bert-large, gpt2, resnet101"):
        load_model("alexnet")
