"""The time of each step while a link becomes slow and fast again, measured by ``benchmarks.heal --json``."""

from __future__ import annotations

import json
from pathlib import Path

from drawing import BLUE, FAINT, ORANGE, Drawing

#: By phase: its steps (when each was over in seconds since the phase began, and how long it took), the optimum, the
#: time of a ring, and when an epoch began.
_PHASES = Path(__file__).with_name("healing_steps.json")
_LEFT, _TOP, _WIDTH, _HEIGHT = 70, 60, 800, 240
_GAP_S = 1.0  # between phases, in which gloo was measured


def svg() -> str:
    """The picture."""
    phases = json.loads(_PHASES.read_text())
    longest_s = max(took for phase in phases for _, took in phase["steps"]) * 1.15
    total_s = sum(phase["steps"][-1][0] + _GAP_S for phase in phases)
    x_scale, y_scale = (_WIDTH - _LEFT - 20) / total_s, _HEIGHT / longest_s
    drawing = Drawing(_WIDTH, _TOP + _HEIGHT + 90, "The time of a step while a link becomes slow and fast again")
    bottom = _TOP + _HEIGHT
    for place, (fill, text) in enumerate(((BLUE, "a step"), (ORANGE, "a step with the shares of before"))):
        drawing.box((_LEFT + 110 * place, 14, 22, 22), fill=fill)
        drawing.text(_LEFT + 30 + 110 * place, 30, text)
    since = float(_LEFT)
    for phase in phases:
        epochs = [at for at, *_ in phase["epochs"]]
        for at, took in phase["steps"]:
            is_before = bool(epochs) and at - took < epochs[-1]
            x, width, height = since + (at - took) * x_scale, max(took * x_scale - 1, 2), took * y_scale
            drawing.box((x, bottom - height, width, height), fill=ORANGE if is_before else BLUE)
        end = since + phase["steps"][-1][0] * x_scale
        for what, at in (("optimum", phase["optimum_s"]), ("ring", phase["ring_s"])):
            y = bottom - at * y_scale
            if y > _TOP - 10:
                drawing.line((since, y), (end, y))
                drawing.text(end - 4, y - 5, f"{what} {at:.2f} s", size=12, anchor="end", color=FAINT)
        drawing.text((since + end) / 2, bottom + 24, _NAMES[phase["name"]], size=14, anchor="middle")
        for at in epochs:
            drawing.text(since + at * x_scale, bottom + 46, f"new shares, {at:.1f} s", size=12, color=FAINT)
        since = end + _GAP_S * x_scale
    drawing.text(18, _TOP + 12, f"{longest_s:.1f} s", size=12, color=FAINT)
    drawing.text(18, bottom, "0 s", size=12, color=FAINT)
    drawing.text(_LEFT, bottom + 74, f"{total_s:.0f} s in all", size=12, color=FAINT)
    return drawing.svg()


_NAMES = {"before": "all links alike", "slow": "one link at half its rate", "back": "all links alike again"}
