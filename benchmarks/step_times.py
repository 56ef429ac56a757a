"""How far `bps plan predict` is from measured steps: vTrain's published rows, those that the model has not seen.

    python -m benchmarks.step_times FOLDER [--rows 100] [--json docs/generators/step_times.json]

FOLDER has single_node.csv and multi_node.csv of VIA-Research/vTrain (MIT licence). "chosen rows" is what `bps plan
calibrate` does; "random rows" takes others instead, ten times; "without …" leaves out all rows with one value and
predicts these. "picks": in each group of rows with the same model, GPUs and batch, how much slower the layout with the
shortest predicted time is than the fastest one. With ``--json``, pairs of measured and predicted times for the picture
in docs/explanation/cost-models.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from byteps_py.tools.plan.calibration import calibrate
from byteps_py.tools.plan.step_table import StepLayout, StepRow, read_steps
from byteps_py.tools.plan.step_time import Hardware

_ONE_VALUE = ("hidden", "layers", "tp", "pp", "dp", "micro_batch", "gpus")
_SEEDS = 10


@dataclass(frozen=True)
class Predictions:
    """Of rows that a model has not seen."""

    #: (layout, measured, predicted) in milliseconds.
    rows: list[tuple[StepLayout, float, float]]

    @property
    def error(self) -> float:
        """The mean of |predicted / measured - 1|."""
        return statistics.fmean(abs(predicted / measured - 1) for _, measured, predicted in self.rows)

    @property
    def picks(self) -> list[float]:
        """By group: measured time of the layout that is predicted to be fastest over the shortest one, less 1."""
        groups: dict[tuple[int, ...], list[tuple[float, float]]] = {}
        for layout, measured, predicted in self.rows:
            key = (layout.hidden, layout.layers, layout.gpus, layout.batch)
            groups.setdefault(key, []).append((predicted, measured))
        return [
            min(group)[1] / min(measured for _, measured in group) - 1 for group in groups.values() if len(group) > 1
        ]


def predictions(seen: Sequence[StepRow], others: Iterable[StepRow], rows: int) -> Predictions:
    """``others``, by a model that is fitted to ``rows`` of ``seen``."""
    model = calibrate(seen, rows, Hardware())
    lines = {line for fit in model.fits.values() for line in fit.lines}
    left = [(row.layout, row.measured_ms) for row in others if row.line not in lines and row.layout and row.measured_ms]
    times = model.predict([layout for layout, _ in left])
    return Predictions([(layout, measured, time) for (layout, measured), time in zip(left, times, strict=True)])


def _report(name: str, found: Predictions) -> None:
    picks = found.picks
    picked = f"picks {statistics.fmean(picks):.2%} behind, {max(picks):.1%} at most" if picks else ""
    print(f"  {name:<28} {len(found.rows):>4} rows, off by {found.error:6.2%}  {picked}")


def _without(rows: list[StepRow], attribute: str, count: int) -> dict[int, Predictions]:
    values = sorted({getattr(row.layout, attribute) for row in rows})
    parts = {value: [row for row in rows if getattr(row.layout, attribute) == value] for value in values}
    return {
        value: predictions([row for row in rows if row not in part], part, count)
        for value, part in parts.items()
        if len(part) < len(rows)
    }


def _random(rows: list[StepRow], count: int) -> list[Predictions]:
    found = []
    for seed in range(_SEEDS):
        seen = random.Random(seed).sample(rows, count)
        found.append(predictions(seen, [row for row in rows if row not in seen], count))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    single = read_steps(str(arguments.folder / "single_node.csv"))
    multi = read_steps(str(arguments.folder / "multi_node.csv"))
    pairs: dict[str, list[tuple[float, float]]] = {}
    chosen = predictions(single, single, arguments.rows)
    print("one machine")
    _report(f"{arguments.rows} chosen rows", chosen)
    sizes = _without(multi, "hidden", arguments.rows)
    for rows, count in ((single, arguments.rows), (multi, len(multi) * 2 // 3)):
        if rows is multi:
            print("several machines")
        drawn = _random(rows, count)
        errors = [found.error for found in drawn]
        picks = [pick for found in drawn for pick in found.picks]
        print(
            f"  {_SEEDS} times {count} random rows: off by {statistics.fmean(errors):.2%}, {max(errors):.2%} at most; "
            f"picks {statistics.fmean(picks):.2%} behind"
        )
        for attribute in _ONE_VALUE:
            left_out = sizes if rows is multi and attribute == "hidden" else _without(rows, attribute, arguments.rows)
            for value, found in left_out.items():
                _report(f"without {attribute} {value}", found)
    pairs["one machine"] = [(measured, predicted) for _, measured, predicted in chosen.rows]
    for found in sizes.values():
        pairs.setdefault("several machines", []).extend((measured, predicted) for _, measured, predicted in found.rows)
    if arguments.json:
        rounded = {name: [[round(value) for value in pair] for pair in some] for name, some in pairs.items()}
        arguments.json.write_text(json.dumps(rounded, separators=(",", ":")).replace("]],", "]],\n") + "\n")


if __name__ == "__main__":
    main()
