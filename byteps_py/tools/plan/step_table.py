"""Tables of steps: each row of a CSV file is a training job of a GPT-like model, with the sizes of its mesh and,
perhaps, the measured time of a step.

The columns are those of vTrain's published measurements (VIA-Research/vTrain); COLUMNS has them, OPTIONAL those that a
table may lack. A row with a hole, or whose numbers contradict each other, stays in the table with its problem. Reads
files and does nothing else; any thread.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from byteps_py.errors import UsageError
from byteps_py.wording import shown

Column = npt.NDArray[np.float64]

#: The values that a backward pass computes again: nothing, the scores of attention, whole layers.
Recomputed = Literal["none", "selective", "full"]
RECOMPUTED: tuple[Recomputed, ...] = get_args(Recomputed)

#: Of a table: its name there, and the attribute of StepLayout.
COLUMNS = {
    "# GPUs": "gpus",
    "global batch": "batch",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "sequence",
    "tensor parallelism": "tp",
    "data parallelism": "dp",
    "pipeline parallelism": "pp",
}
#: Columns that a table may lack, and cells that may be empty: a default stands for them.
OPTIONAL = {
    "vocabulary": "vocabulary",
    "context parallelism": "cp",
    "model chunks": "chunks",
    "recomputation": "recomputed",
    "sequence parallelism": "sequence_parallel",
    "fused attention": "fused_attention",
}
MEASURED = "iteration time (ms)"
_FLAGS = ("sequence_parallel", "fused_attention", "data_outermost")
_OF_MODEL = ("layer_parameters", "kv_hidden")


@dataclass(frozen=True, slots=True)
class StepLayout:
    """One job: a GPT with feed-forward layers of 4h, and its division among GPUs.

    Raises UsageError if a number is not a whole one of at least 1, or if the numbers do not go together.

    >>> StepLayout(8, 16, 2, 1024, 16, 24, 1024, tp=2, dp=2, pp=2).micro_batches
    4
    """

    gpus: int
    #: Sequences of a step, over all GPUs.
    batch: int
    #: Sequences of a micro-batch.
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    #: Tokens of a sequence.
    sequence: int
    tp: int
    dp: int
    pp: int
    cp: int = 1
    vocabulary: int = 51200
    #: Of a layer; None: the 12h² of a GPT.
    layer_parameters: int | None = None
    #: Values of a token's keys, and of its values in attention; None: h.
    kv_hidden: int | None = None
    #: Model chunks of each worker of an interleaved pipeline.
    chunks: int = 1
    recomputed: Recomputed = "none"
    #: Tensor-parallel ranks divide what lies between layers, too.
    sequence_parallel: bool = False
    #: Attention keeps no scores in memory (FlashAttention), and computes only those of earlier tokens.
    fused_attention: bool = False
    #: Neighbouring ranks are stages of a pipeline, not data-parallel ones: the default order of ``bps.parallel.Mesh``.
    data_outermost: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in (*_FLAGS, "recomputed") or (field.name in _OF_MODEL and value is None):
                continue
            if type(value) is not int or value < 1:
                raise UsageError(f"{field.name}={value!r}: a whole number of at least 1 is needed")
        if self.recomputed not in RECOMPUTED:
            raise UsageError(f"recomputed={self.recomputed!r}: give one of {', '.join(RECOMPUTED)}")
        if self.tp * self.cp * self.dp * self.pp != self.gpus:
            sizes = f"tp {self.tp} · dp {self.dp} · pp {self.pp}" + (f" · cp {self.cp}" if self.cp > 1 else "")
            raise UsageError(f"{sizes} is not {self.gpus}, the number of GPUs")
        if self.batch % (self.dp * self.micro_batch):
            raise UsageError(
                f"a batch of {self.batch} is no whole number of micro-batches of {self.micro_batch} on each of "
                f"{self.dp} data-parallel ranks"
            )
        if self.pp * self.chunks > self.layers:
            raise UsageError(f"{self.layers} layers are too few for {self.pp} · {self.chunks} chunks of a pipeline")

    @property
    def micro_batches(self) -> int:
        """Of a data-parallel rank in a step."""
        return self.batch // (self.dp * self.micro_batch)


@dataclass(frozen=True, slots=True)
class StepRow:
    """A row of a table: its layout, and what is wrong with it: then there is no layout, or only one like it."""

    #: In the file; its header is line 1.
    line: int
    layout: StepLayout | None
    #: Milliseconds of a step; None where the table does not say.
    measured_ms: float | None
    problem: str = ""


def read_steps(path: str) -> list[StepRow]:
    """The rows of a CSV file. A row with a hole has its problem, and no layout.

    Raises UsageError if the file can't be read, if it lacks a column, or if it has no rows.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            if missing := [name for name in COLUMNS if name not in header]:
                raise UsageError(
                    f"{shown(path)} lacks the column{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}; a "
                    f"table of steps has {', '.join(map(repr, COLUMNS))}, and {MEASURED!r} where steps were measured"
                )
            if len(set(header)) < len(header):
                twice = next(name for name in header if header.count(name) > 1)
                raise UsageError(f"{shown(path)} has the column {shown(twice)!r} twice: remove one of them")
            rows = [_row(reader.line_num, header, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except OSError as error:
        raise UsageError(f"{shown(path)} can't be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{shown(path)} is no CSV file ({error}): check its quotation marks") from error
    if not rows:
        raise UsageError(f"{shown(path)} has a header and no rows: there is no step in it")
    return rows


def _row(line: int, header: list[str], cells: list[str]) -> StepRow:
    found = {name: cell.strip() for name, cell in zip(header, cells, strict=False)}
    measured, layout, problems = None, None, []
    try:
        measured = _measured(found.get(MEASURED, ""))
    except UsageError as error:
        problems.append(str(error))
    try:
        values = _values(found)
        whole = values["dp"] * values["micro_batch"]
        layout = StepLayout(**(values | {"batch": -(-values["batch"] // whole) * whole}))
        if layout.batch != values["batch"]:
            problems.append(
                f"a batch of {values['batch']} is no whole number of micro-batches of {layout.micro_batch} on each of "
                f"{layout.dp} data-parallel ranks; predicted for {layout.batch}"
            )
    except UsageError as error:
        problems.append(str(error))
    return StepRow(line, layout, measured, f"line {line}: {'; '.join(problems)}" if problems else "")


def _measured(text: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"{MEASURED!r} is {shown(text)!r}: a number of milliseconds above 0 is needed")
    return value


def _values(found: dict[str, str]) -> dict[str, Any]:
    """By attribute of StepLayout."""
    if holes := [name for name in COLUMNS if not found.get(name)]:
        raise UsageError(f"no value for {', '.join(map(repr, holes))}")
    values: dict[str, Any] = {attribute: _whole(name, found[name]) for name, attribute in COLUMNS.items()}
    for name, attribute in OPTIONAL.items():
        if text := found.get(name):
            values[attribute] = _optional(name, attribute, text)
    return values


def _optional(name: str, attribute: str, text: str) -> int | str | bool:
    if attribute in _FLAGS:
        if text not in ("no", "yes"):
            raise UsageError(f"{name!r} is {shown(text)!r}: it is yes or no")
        return text == "yes"
    if attribute != "recomputed":
        return _whole(name, text)
    if text not in RECOMPUTED:
        raise UsageError(f"{name!r} is {shown(text)!r}: it is one of {', '.join(RECOMPUTED)}")
    return text


def _whole(name: str, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value < 2**53 or value != int(value):
        raise UsageError(f"{name!r} is {shown(text)!r}: a whole number of at least 1 is needed")
    return int(value)


@dataclass(frozen=True, slots=True)
class StepLayouts:
    """Many layouts as columns of numbers, for formulas that take all of them at once."""

    gpus: Column
    batch: Column
    micro_batch: Column
    hidden: Column
    heads: Column
    layers: Column
    sequence: Column
    tp: Column
    dp: Column
    pp: Column
    cp: Column
    vocabulary: Column
    chunks: Column
    layer_parameters: Column
    kv_hidden: Column
    #: Shares of a forward pass that are repeated: of the scores of attention, and of everything else.
    repeats_scores: Column
    repeats_rest: Column
    #: 1 for yes, 0 for no.
    sequence_parallel: Column
    fused_attention: Column
    data_outermost: Column

    @staticmethod
    def of(layouts: Sequence[StepLayout]) -> StepLayouts:
        """In their order."""
        own = (*_OF_MODEL, "recomputed")
        names = [field.name for field in fields(StepLayout) if field.name not in own]
        columns = {name: np.array([getattr(layout, name) for layout in layouts], np.float64) for name in names}
        return StepLayouts(
            **columns,
            layer_parameters=np.array([each.layer_parameters or 12 * each.hidden**2 for each in layouts], np.float64),
            kv_hidden=np.array([each.kv_hidden or each.hidden for each in layouts], np.float64),
            repeats_scores=np.array([layout.recomputed != "none" for layout in layouts], np.float64),
            repeats_rest=np.array([layout.recomputed == "full" for layout in layouts], np.float64),
        )

    @property
    def micro_batches(self) -> Column:
        """Of a data-parallel rank in a step."""
        return self.batch / (self.dp * self.micro_batch)
