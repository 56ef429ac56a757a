"""Three steps of four ranks, of which one computes slowly: own work and waits, from the trace of the page's program."""

from __future__ import annotations

import json
from pathlib import Path

from drawing import BLUE, FAINT, ORANGE, Drawing

_SPANS = Path(__file__).with_name("slow_rank_spans.json")  # by rank: when each sum began and ended, in milliseconds
_LEFT, _TOP, _ROW, _WIDTH = 90, 66, 46, 800


def svg() -> str:
    """The picture."""
    spans: dict[str, list[list[float]]] = json.loads(_SPANS.read_text())
    ends = [end for each in spans.values() for _, end in each]
    first = min(each[0][0] for each in spans.values())
    scale = (_WIDTH - _LEFT - 20) / (max(ends) - first)
    drawing = Drawing(_WIDTH, _TOP + _ROW * len(spans) + 44, "Own work and waits of four ranks in three steps")
    for place, (fill, text) in enumerate(((BLUE, "own work"), (ORANGE, "waits for the others, and sums"))):
        drawing.box((_LEFT + 150 * place, 18, 22, 22), fill=fill)
        drawing.text(_LEFT + 30 + 150 * place, 34, text)
    for row, (rank, each) in enumerate(spans.items()):
        y = _TOP + _ROW * row
        drawing.text(18, y + 22, f"rank {rank}")
        before = first
        for start, end in each:
            drawing.box((_LEFT + (before - first) * scale, y, max(start - before, 0.1) * scale, 32), fill=BLUE)
            drawing.box((_LEFT + (start - first) * scale, y, max(end - start, 0.1) * scale, 32), fill=ORANGE)
            before = end
    bottom = _TOP + _ROW * len(spans) + 22
    drawing.text(_LEFT, bottom, "0 ms", size=13, color=FAINT)
    drawing.text(_WIDTH - 20, bottom, f"{max(ends) - first:.0f} ms", size=13, anchor="end", color=FAINT)
    return drawing.svg()
