"""One step of four ranks on two machines, from the trace of a real job (tests/programs/traced.py)."""

from __future__ import annotations

import json
from pathlib import Path

from drawing import BLUE, FAINT, GREEN, ORANGE, Drawing

_SPANS = Path(__file__).with_name("trace_spans.json")  # by process, by row: [begin, end] in ms
_LEFT, _TOP, _ROW, _WIDTH, _HEADING = 190, 60, 19, 900, 22
_FILLS = {"waits": ORANGE, "local_reduce": GREEN, "exchange": GREEN, "local_broadcast": GREEN, "sum": GREEN,
          "wait_for_machines": ORANGE}  # fmt: skip


def svg() -> str:
    """The picture."""
    found: dict[str, dict[str, list[list[float]]]] = json.loads(_SPANS.read_text())
    last = max(end for rows in found.values() for spans in rows.values() for _, end in spans)
    scale = (_WIDTH - _LEFT - 20) / last
    height = _TOP + sum(_HEADING + _ROW * len(rows) for rows in found.values()) + 34
    drawing = Drawing(_WIDTH, height, "A trace of one step: what ranks, services and servers did")
    for place, (fill, text) in enumerate(((BLUE, "operations of ranks"), (GREEN, "stages"), (ORANGE, "waits"))):
        drawing.box((_LEFT + 190 * place, 16, 20, 20), fill=fill)
        drawing.text(_LEFT + 28 + 190 * place, 32, text, size=14)
    y = float(_TOP)
    for process, rows in found.items():
        drawing.text(12, y + 14, process, size=14)
        y += _HEADING
        for row, spans in rows.items():
            drawing.text(28, y + 12, row, size=12, color=FAINT)
            for begin, end in spans:
                drawing.box(
                    (_LEFT + begin * scale, y, max((end - begin) * scale, 1.0), _ROW - 4), fill=_FILLS.get(row, BLUE)
                )
            y += _ROW
    drawing.text(_LEFT, y + 20, "0 ms", size=13, color=FAINT)
    drawing.text(_WIDTH - 20, y + 20, f"{last:.0f} ms", size=13, anchor="end", color=FAINT)
    return drawing.svg()
