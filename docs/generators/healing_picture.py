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
    longest_s = max(max(phase["ring_s"], *(took for _, took in phase["steps"])) for phase in phases) * 1.05
    total_s = sum(phase["steps"][-1][0] + _GAP_S for phase in phases)
    x_scale, y_scale = (_WIDTH - _LEFT - 20) / total_s, _HEIGHT / longest_s
    drawing = Drawing(_WIDTH, _TOP + _HEIGHT + 90, "The time of a step while a link becomes slow and fast again")
    bottom = _TOP + _HEIGHT
    for place, (fill, text) in enumerate(((BLUE, "a step"), (ORANGE, "a step with the shares of before"))):
        drawing.box((_LEFT + 110 * place, 14, 22, 22), fill=fill)
        drawing.text(_LEFT + 30 + 110 * place, 30, text)
    since = float(_LEFT)
    for phase in phases:
        epochs = [at for at, *_ in phase["epochs"]] if phase is not phases[0] else []  # that of the start is no news
        for at, took in phase["steps"]:
            is_before = bool(epochs) and at - took < epochs[-1]
            x, width, height = since + (at - took) * x_scale, max(took * x_scale - 1, 2), took * y_scale
            drawing.box((x, bottom - height, width, height), fill=ORANGE if is_before else BLUE)
        end = since + phase["steps"][-1][0] * x_scale
        middle = (since + end) / 2
        for seconds in (phase["optimum_s"], phase["ring_s"]):
            drawing.line((since, bottom - seconds * y_scale), (end, bottom - seconds * y_scale))
        drawing.text(middle, bottom + 24, _NAMES[phase["name"]], size=14, anchor="middle")
        times = f"optimum {phase['optimum_s']:.2f} s, a ring {phase['ring_s']:.2f} s"
        drawing.text(middle, bottom + 44, times, size=12, anchor="middle", color=FAINT)
        if epochs:
            said = f"new shares after {epochs[-1]:.1f} s"
            drawing.text(middle, bottom + 62, said, size=12, anchor="middle", color=FAINT)
        since = end + _GAP_S * x_scale
    drawing.text(18, _TOP + 12, f"{longest_s:.1f} s", size=12, color=FAINT)
    drawing.text(18, bottom, "0 s", size=12, color=FAINT)
    return drawing.svg()


_NAMES = {"before": "all links alike", "slow": "one link at half its rate", "back": "all links alike again"}
