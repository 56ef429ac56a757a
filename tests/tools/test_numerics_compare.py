"""`bps numerics compare` on records of every kind of placement, written without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from byteps_py.cli.__main__ import main
from byteps_py.errors import UsageError
from byteps_py.tools.numerics import (
    RankLayout,
    RecordRule,
    TensorPlacement,
    compare,
    context_parallel_rules,
    head_tail,
    partial,
    separate,
    sharded,
    tensor_parallel_rules,
)
from byteps_py.tools.numerics.assembly import numbers_of, sum_in_order, ulps_between
from byteps_py.tools.numerics.records import RecordWriter, TensorRecord, described

Array = np.ndarray[Any, Any]
#: For coordinates: the tensor and its placements.
Part = Callable[[dict[str, int]], tuple[Array, Mapping[str, TensorPlacement]]]


def record_of(array: Array, coordinates: dict[str, int], **fields: Any) -> TensorRecord:
    given: dict[str, Any] = {
        "step": 0,
        "micro_batch": 0,
        "phase": "forward",
        "module": "layer",
        "tensor": "output",
        "occurrence": 0,
        "coordinates": coordinates,
        "dtype": str(array.dtype),
        "shape": array.shape,
        "digest": xxhash.xxh3_128_hexdigest(array.tobytes()),
        "minimum": None,
        "maximum": None,
        "norm": 1.0,
        "placements": {},
    }
    return TensorRecord(**{**given, **fields})


def write(folder: Path, sizes: dict[str, int], part: Part, values: bool = True, **fields: Any) -> Path:
    """One tensor of a run on a mesh; the last dimension's coordinate changes with each rank."""
    for rank, place in enumerate(np.ndindex(*sizes.values())):
        coordinates = dict(zip(sizes, place, strict=True))
        array, placements = part(coordinates)
        writer = RecordWriter(folder, RankLayout(rank, coordinates, sizes))
        record = record_of(array, coordinates, placements=placements, **fields)
        writer.write(record, array.tobytes() if values else None)
        writer.close()
    return folder


def whole(folder: Path, array: Array, **fields: Any) -> Path:
    return write(folder / "reference", {}, lambda _: (array, {}), **fields)


GRID = np.arange(48, dtype=np.float32).reshape(8, 6)


def chunks_of(array: Array, dim: int, count: int, *which: int) -> Array:
    return np.concatenate([np.array_split(array, count, dim)[number] for number in which], dim)


def by_columns(at: dict[str, int]) -> tuple[Array, Mapping[str, TensorPlacement]]:
    return chunks_of(GRID, 1, 2, at["tp"]), {"tp": sharded(-1)}


def in_head_tail_chunks(at: dict[str, int]) -> tuple[Array, Mapping[str, TensorPlacement]]:
    return chunks_of(GRID, 0, 4, at["cp"], 3 - at["cp"]), {"cp": head_tail(0)}


def in_spans(at: dict[str, int]) -> tuple[Array, Mapping[str, TensorPlacement]]:
    spans = [[(0, 1), (5, 8)], [(1, 5)]][at["cp"]]
    return np.concatenate([GRID[a:b] for a, b in spans]), {"cp": sharded(0, spans)}


def cut_twice(at: dict[str, int]) -> tuple[Array, Mapping[str, TensorPlacement]]:
    """First for tensor parallelism, then each part over data-parallel ranks."""
    return chunks_of(chunks_of(GRID, 0, 2, at["tp"]), 0, 2, at["dp"]), {"tp": sharded(0), "dp": sharded(0)}


def unevenly(at: dict[str, int]) -> tuple[Array, Mapping[str, TensorPlacement]]:
    return chunks_of(GRID, 0, 3, at["tp"]), {"tp": sharded(0)}


def in_partial_sums(at: dict[str, int]) -> tuple[Array, Mapping[str, TensorPlacement]]:
    return (GRID - 7 if at["tp"] else np.full_like(GRID, 7)), {"tp": partial()}


def everywhere(at: dict[str, int]) -> tuple[Array, Mapping[str, TensorPlacement]]:
    return GRID, {}


PLACEMENTS: list[tuple[dict[str, int], Part]] = [
    ({"tp": 2}, by_columns),
    ({"cp": 2}, in_head_tail_chunks),
    ({"cp": 2}, in_spans),
    ({"dp": 2, "tp": 2}, cut_twice),
    ({"tp": 2, "dp": 2}, cut_twice),
    ({"tp": 3}, unevenly),
    ({"tp": 2}, in_partial_sums),
    ({"cp": 2, "tp": 2}, by_columns),
    ({"pp": 2}, everywhere),
]


@pytest.mark.parametrize(("sizes", "part"), PLACEMENTS)
def test_parts_are_put_together(tmp_path: Path, sizes: dict[str, int], part: Part) -> None:
    run, reference = write(tmp_path / "run", sizes, part), whole(tmp_path, GRID)
    assert compare(reference, run).equal == 1
    assert compare(run, reference).equal == 1


@pytest.mark.parametrize(("sizes", "part"), PLACEMENTS)
@pytest.mark.parametrize("element", [(0, 0), (3, 4), (7, 5)])
def test_a_wrong_element_and_its_rank_are_found(
    tmp_path: Path, sizes: dict[str, int], part: Part, element: tuple[int, int]
) -> None:
    """The reference has another value, so all ranks that hold this element are named."""
    expected = GRID.copy()
    expected[element] = np.nextafter(GRID[element], np.float32(100))
    run = write(tmp_path / "run", sizes, part)
    result = compare(whole(tmp_path, expected), run)
    found = result.differences[0]
    assert (found.elements, found.max_ulp, found.first, found.size) == (1, 1, element, 48)
    places = [dict(zip(sizes, place, strict=True)) for place in np.ndindex(*sizes.values())]
    holders = [rank for rank, at in enumerate(places) if GRID[element] in part(at)[0]]
    assert list(found.ranks) == (list(range(len(places))) if part is in_partial_sums else holders)


def test_a_copy_that_differs_names_its_dimension(tmp_path: Path) -> None:
    def part(at: dict[str, int]) -> tuple[Array, Mapping[str, TensorPlacement]]:
        array, placements = by_columns(at)
        return array + np.float32(at == {"dp": 1, "tp": 1}), placements

    run = write(tmp_path / "run", {"dp": 2, "tp": 2}, part, operation="gather of columns", over="tp")
    (found,) = compare(whole(tmp_path, GRID), run).differences
    assert (found.ranks, found.along, dict(found.coordinates)) == ((3,), ("dp",), {"dp": 1, "tp": 1})
    assert found.cut == ("tp",)
    assert found.text == (
        "step 0, micro-batch 0, forward, layer output (gather of columns), rank 3 (dp 1, tp 1), differs along dp: 24 "
        f"of 48 elements differ, max {found.max_ulp} ulp, first at [0, 3], relative error 0.026"
    )


def test_a_fault_of_all_ranks_names_the_dimensions_along_which_they_agree(tmp_path: Path) -> None:
    def part(at: dict[str, int]) -> tuple[Array, Mapping[str, TensorPlacement]]:
        array, placements = by_columns(at)
        return array + np.float32(1), placements

    run = write(tmp_path / "run", {"dp": 2, "tp": 2}, part, phase="reduction", micro_batch=None)
    found = compare(whole(tmp_path, GRID, phase="reduction", micro_batch=None), run).differences[0]
    assert (found.ranks, found.along, found.alike, found.cut) == ((0, 1, 2, 3), (), ("dp",), ("tp",))
    assert "ranks 0-3, wrong on all ranks along dp: 48 of 48" in found.text


def test_separate_tensors_have_their_own_reference(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "reference", RankLayout())
    for dp in range(2):
        array = GRID + dp
        writer.write(record_of(array, {"dp": dp}, placements={"dp": separate()}), array.tobytes())
    writer.close()
    run = write(tmp_path / "run", {"dp": 2}, lambda at: (GRID + at["dp"], {"dp": separate()}))
    assert compare(tmp_path / "reference", run).equal == 2
    wrong = write(tmp_path / "wrong", {"dp": 2}, lambda at: (GRID, {"dp": separate()}))
    (found,) = compare(tmp_path / "reference", wrong).differences
    assert found.ranks == (1,)
    assert found.key.text == "step 0, dp 1, micro-batch 0, forward, layer output"


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (GRID.astype(np.float64), "dtype float64, in the reference float32"),
        (GRID.reshape(6, 8), "shape [6, 8], in the reference [8, 6]: if ranks hold parts of it"),
        (-GRID, "48 of 48 elements differ"),  # -0 is not 0
        (np.where(GRID == 5, np.float32("nan"), GRID), "1 of 48 elements differ"),
    ],
)
def test_differences_of_other_kinds(tmp_path: Path, array: Array, reason: str) -> None:
    run = write(tmp_path / "run", {"tp": 2}, lambda _: (array, {}))
    result = compare(whole(tmp_path, GRID), run, tolerance=1e-3)
    assert result.differences[0].reason.startswith(reason)


def test_tolerance_is_relative_to_the_norm(tmp_path: Path) -> None:
    run = write(tmp_path / "run", {"tp": 2}, lambda _: (GRID * np.float32(1.001), {}))
    reference = whole(tmp_path, GRID)
    assert compare(reference, run, tolerance=0.0011).close == 1
    assert len(compare(reference, run, tolerance=0.0009).differences) == 1
    for tolerance in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="tolerance"):
            compare(reference, run, tolerance=tolerance)


def test_missing_tensors_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = whole(tmp_path, GRID, module="one")
    run = write(tmp_path / "run", {"tp": 2}, everywhere, module="two")
    assert main(["numerics", "compare", str(reference), str(run)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "Missing in the run: 1 tensor, the first: step 0, micro-batch 0, forward, one output",
        "Missing in the reference: 1 tensor, the first: step 0, micro-batch 0, forward, two output",
        "0 tensors equal bit for bit.",
    ]


def test_patterns_choose_modules(tmp_path: Path) -> None:
    reference = whole(tmp_path, GRID, module="layers.1.wo")
    run = write(tmp_path / "run", {"tp": 2}, lambda _: (GRID + 1, {}), module="layers.1.wo")
    assert compare(reference, run, modules="layers.1.*").differences
    assert compare(reference, run, modules="layers.2.*").equal == 0


def test_the_order_of_several_ranks_is_that_of_execution(tmp_path: Path) -> None:
    """Of a pipeline: forward from the first rank on, backward from the last."""
    for folder, shift in (("reference", 0), ("run", 1)):
        for rank in range(2):
            coordinates = {"pp": rank}
            writer = RecordWriter(tmp_path / folder, RankLayout(rank, coordinates, {"pp": 2}))
            for micro_batch in (1, 0):
                for phase in ("backward", "forward"):
                    wrong = shift and micro_batch == 1 and phase == "backward"
                    array = GRID + np.float32(bool(wrong))
                    fields = {"micro_batch": micro_batch, "phase": phase, "module": f"layers.{rank}"}
                    writer.write(record_of(array, coordinates, **fields), array.tobytes())
            writer.close()
    result = compare(tmp_path / "reference", tmp_path / "run")
    assert [found.key.module for found in result.differences] == ["layers.1", "layers.0"]


# ---- bad input -------------------------------------------------------------------------------------------------


def break_line(folder: Path) -> None:
    path = folder / "rank00001.jsonl"
    path.write_text(path.read_text().replace('"shape"', '"form"'))


def change_format(folder: Path) -> None:
    path = folder / "rank00000.jsonl"
    path.write_text(path.read_text().replace("numerics 1", "numerics 9"))


def change_number(folder: Path) -> None:
    path = folder / "rank00000.jsonl"
    path.write_text(path.read_text().replace('"occurrence": 0', '"occurrence": "0"'))


def change_sizes(folder: Path) -> None:
    path = folder / "rank00000.jsonl"
    path.write_text(path.read_text().replace('"sizes": {"tp": 2}', '"sizes": {"tp": 4}'))


def remove_rank(folder: Path) -> None:
    (folder / "rank00001.jsonl").unlink()


def remove_all(folder: Path) -> None:
    for path in folder.glob("*"):
        path.unlink()


def make_binary(folder: Path) -> None:
    (folder / "rank00001.jsonl").write_bytes(b"\xff\x00")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_line, "rank00001.jsonl: line 2 is not a record"),
        (change_format, "this version reads 'byteps_py numerics 1'"),
        (change_number, "an integer of at least 0"),
        (change_sizes, "the files are of different runs"),
        (remove_rank, "collect the files of all ranks"),
        (remove_all, "no records there"),
        (make_binary, "it can't be read"),
    ],
)
def test_damaged_records_are_bad_input(
    tmp_path: Path, damage: Callable[[Path], None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "run", {"tp": 2}, by_columns)
    damage(run)
    assert main(["numerics", "compare", str(whole(tmp_path, GRID)), str(run)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_rank_that_was_killed_leaves_complete_lines(tmp_path: Path) -> None:
    run = write(tmp_path / "run", {"tp": 2}, everywhere)
    with (run / "rank00001.jsonl").open("a") as file:
        file.write('{"step": 1, "micro')
    assert compare(whole(tmp_path, GRID), run).equal == 1


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda at: (GRID, {"tp": sharded(2)}), "cut along its dimension 2, but has shape [8, 6]"),
        (lambda at: (GRID, {"tp": sharded(0, [(0, 8)])}), "do not give each of 16 indices once"),
        (lambda at: (GRID[: 3 + at["tp"]], {"tp": head_tail(0)}), "head–tail chunks of different lengths"),
        (lambda at: (GRID[:, : 2 + at["tp"]], {"tp": sharded(0)}), "don't fit along dimension 0"),
        (lambda at: (GRID[: 2 + at["tp"]], {"tp": partial()}), "partial sums of different shapes"),
        (lambda at: (GRID, {"tp": sharded(0)} if at["tp"] else {}), "give all ranks the same rules"),
    ],
)
def test_placements_that_do_not_fit_are_bad_input(tmp_path: Path, part: Part, message: str) -> None:
    run, reference = write(tmp_path / "run", {"tp": 2}, part), whole(tmp_path, GRID)
    with pytest.raises(UsageError) as raised:
        compare(reference, run)
    assert message in str(raised.value)


def test_what_a_killed_rank_has_not_recorded_is_named(tmp_path: Path) -> None:
    """Its lines, or the values of its last tensors."""
    for number, part in enumerate((by_columns, by_columns, everywhere)):
        run = tmp_path / f"run{number}"
        for rank in range(2):
            coordinates = {"tp": rank}
            writer = RecordWriter(run, RankLayout(rank, coordinates, {"tp": 2}))
            array, placements = part(coordinates)
            for step in range(2):
                writer.write(record_of(array, coordinates, placements=placements, step=step), array.tobytes())
            writer.close()
        if number == 1:
            (run / "rank00001.data").write_bytes((run / "rank00001.data").read_bytes()[:-4])
        else:
            lines = (run / "rank00001.jsonl").read_text().splitlines(keepends=True)
            (run / "rank00001.jsonl").write_text("".join(lines[:-1]))
        writer = RecordWriter(tmp_path / "reference", RankLayout())
        for step in range(2):
            writer.write(record_of(GRID, {}, step=step), GRID.tobytes())
        writer.close()
        result = compare(tmp_path / "reference", run)
        said = result.as_text().splitlines()
        assert "Rank 1 of the run has recorded 1 step, others more." in said
        assert not result.is_equal
        if part is by_columns:
            missing = "1 tensor, the first: step 1, micro-batch 0, forward, layer output (the part of tp 1)"
            assert said[0] == f"Missing in the run: {missing}"
            assert result.equal == 1


def test_a_reference_whose_ranks_disagree_is_said(tmp_path: Path) -> None:
    reference = write(tmp_path / "reference", {"tp": 2}, lambda at: (GRID + at["tp"], {}))
    (found,) = compare(reference, write(tmp_path / "run", {"tp": 2}, everywhere)).differences
    assert found.reason.startswith("the reference's own ranks hold different values")


# ---- rules -----------------------------------------------------------------------------------------------------


def test_layouts_and_rules_refuse_what_is_not_there() -> None:
    with pytest.raises(UsageError, match="coordinate 2 of rank 5 in dimension tp, which has size 2"):
        RankLayout(5, {"tp": 2}, {"tp": 2})
    with pytest.raises(UsageError, match="coordinates of tp, but sizes of no dimension"):
        RankLayout(0, {"tp": 0})
    with pytest.raises(UsageError, match="phase 'backwards'"):
        RecordRule(phases=("backwards",))
    with pytest.raises(UsageError, match="placement 'split'"):
        TensorPlacement("split")
    with pytest.raises(UsageError, match="style 'rows'"):
        tensor_parallel_rules({"*": "rows"})


def test_the_first_pattern_of_a_plan_counts() -> None:
    rules = tensor_parallel_rules({"head": "column", "*": "row"})
    assert described(rules, "update", "head", "weight").placements == {"tp": sharded(0)}
    assert described(rules, "update", "other", "weight").placements == {"tp": sharded(1)}


def test_rules_of_several_dimensions_add_up() -> None:
    rules = [*context_parallel_rules(), *tensor_parallel_rules({"wo": "row"}, sequence_dim=1)]
    found = described(rules, "forward", "wo", "output")
    assert dict(found.placements) == {"cp": head_tail(1), "tp": sharded(1)}
    assert (found.operation, found.over) == ("row-parallel reduce-scatter over tp", "tp")
    assert dict(described(rules, "accumulation", "norm", "weight").placements) == {"cp": partial(), "tp": partial()}
    assert dict(described(rules, "update", "norm", "weight").placements) == {}


# ---- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_values_are_those_of_torch(dtype: torch.dtype) -> None:
    kind, name = {2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.itemsize], str(dtype).removeprefix("torch.")
    rng = torch.Generator().manual_seed(0)
    tensors = [(torch.randn(5000, generator=rng) * 10.0**power).to(dtype) for power in (-6, 0, 3)]
    bits = [tensor.view(torch.uint8).numpy().view(kind) for tensor in tensors]
    assert np.array_equal(numbers_of(bits[0], name), tensors[0].double().numpy())
    exact = torch.float32 if dtype.itemsize == 2 else dtype
    total = (tensors[0].to(exact) + tensors[1].to(exact) + tensors[2].to(exact)).to(dtype)
    assert np.array_equal(sum_in_order(bits, name), total.view(torch.uint8).numpy().view(kind))


def test_units_of_the_last_place() -> None:
    def bits(*numbers: float) -> Array:
        return np.array(numbers, np.float32).view(np.uint32)

    above = float(np.nextafter(np.float32(1), np.float32(2)))
    found = ulps_between(bits(1, 0.0, -0.0, 1, -1), bits(above, 0.0, 0.0, -1, -above), "float32")
    assert found is not None
    assert found.tolist() == [1, 0, 1, 2 * 0x3F800000 + 1, 1]


def test_json_of_records_is_valid(tmp_path: Path) -> None:
    run = write(tmp_path / "run", {"cp": 2}, in_spans)
    lines = [json.loads(line) for line in (run / "rank00001.jsonl").read_text().splitlines()]
    assert lines[1]["placements"]["cp"] == {"kind": "shard", "dim": 0, "spans": [[1, 5]]}
