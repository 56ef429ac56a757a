"""Measured and predicted times of steps, by ``benchmarks.step_times --json``: rows of vTrain (MIT licence) that the
model has not seen."""

from __future__ import annotations

import json
import math
from pathlib import Path

from drawing import BLUE, FAINT, INK, ORANGE, Drawing

#: By kind of job: pairs of measured and predicted milliseconds.
_TIMES = Path(__file__).with_name("step_times.json")
_LEFT, _TOP, _SIDE = 80, 50, 380
_FROM_MS, _TO_MS = 50.0, 100_000.0
_TICKS_MS = {100: "0.1 s", 1_000: "1 s", 10_000: "10 s", 100_000: "100 s"}
_NAMES = {"one machine": "2 to 8 GPUs of one machine", "several machines": "256 and 512 GPUs"}


def svg() -> str:
    """The picture."""
    times = json.loads(_TIMES.read_text())
    picture = Drawing(_LEFT + _SIDE + 260, _TOP + _SIDE + 70, "Measured and predicted times of steps")
    bottom = _TOP + _SIDE
    for milliseconds, text in _TICKS_MS.items():
        at = _place(milliseconds)
        picture.text(_LEFT + at, bottom + 22, text, size=12, anchor="middle", color=FAINT)
        picture.text(_LEFT - 8, bottom - at + 4, text, size=12, anchor="end", color=FAINT)
        picture.line((_LEFT + at, bottom), (_LEFT + at, bottom + 6))
        picture.line((_LEFT - 6, bottom - at), (_LEFT, bottom - at))
    picture.box((_LEFT, _TOP, _SIDE, _SIDE))
    picture.line((_LEFT, bottom), (_LEFT + _SIDE, _TOP))
    picture.text(_LEFT + _SIDE / 2, bottom + 48, "measured", size=14, anchor="middle", color=INK)
    picture.text(_LEFT, _TOP - 14, "predicted", size=14, color=INK)
    for row, (kind, fill) in enumerate((("one machine", BLUE), ("several machines", ORANGE))):
        for measured, predicted in times[kind]:
            picture.dot(_LEFT + _place(measured), bottom - _place(predicted), fill)
        error = sum(abs(predicted / measured - 1) for measured, predicted in times[kind]) / len(times[kind])
        y = _TOP + 30 + 60 * row
        picture.box((_LEFT + _SIDE + 24, y - 14, 18, 18), fill=fill)
        picture.text(_LEFT + _SIDE + 52, y, _NAMES[kind], size=14)
        said = f"{len(times[kind])} rows, off by {error:.1%}"
        picture.text(_LEFT + _SIDE + 52, y + 20, said, size=13, color=FAINT)
    return picture.svg()


def _place(milliseconds: float) -> float:
    """On an axis of _SIDE pixels, by the logarithm."""
    return _SIDE * math.log(milliseconds / _FROM_MS) / math.log(_TO_MS / _FROM_MS)
