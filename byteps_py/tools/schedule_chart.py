"""Charts of a timeline: text for a terminal, and SVG. Pure; any thread."""

from __future__ import annotations

import math
from html import escape

from byteps_py.parallel.pipe.program import Action, ActionKind
from byteps_py.parallel.pipe.simulator import ScheduleTimeline, Span

_CHUNKS = "abcdefghijklmnopqrstuvwxyz"
_MOST_COLUMNS = 20_000  # of text
_ROW, _LEFT, _TOP, _UNIT = 30, 80, 24, 26
_COLOURS = {
    ActionKind.FORWARD: ("#8ecae6", "#219ebc", "#bde0fe", "#5fa8d3"),
    ActionKind.BACKWARD: ("#ffd166", "#f4a261", "#ffe5a0", "#e9c46a"),
    ActionKind.INPUT_GRADIENT: ("#ffd166", "#f4a261", "#ffe5a0", "#e9c46a"),
    ActionKind.WEIGHT_GRADIENT: ("#b7e4c7", "#74c69d", "#d8f3dc", "#95d5b2"),
}


def text_chart(timeline: ScheduleTimeline) -> str:
    """A row for each worker and a column for each unit of time. "F3" begins the forward pass of micro-batch 3, "B3" the
    backward pass; "==" continues it, ".." is idle time. With several stages of one pipe on a worker, a letter says
    which: "F3b". A column is as long as the shortest action, unless the chart would be wider than 20,000 columns."""
    program = timeline.program
    unit = max(_shortest(timeline), timeline.makespan / _MOST_COLUMNS)
    rows = []
    for worker, spans in enumerate(timeline.spans):
        cells: dict[int, str] = {}
        for span in spans:
            first, end = _column(span.start / unit), _column(span.end / unit)
            cells |= dict.fromkeys(range(first, end), "==")
            cells[first] = _label(timeline, worker, span.action)
        rows.append(cells)
    columns = max((column + 1 for cells in rows for column in cells), default=0)
    width = max([2, *(len(cell) for cells in rows for cell in cells.values())])
    lines = [f"{program.name}: {len(rows)} workers, {program.micro_batches} micro-batches"]
    for worker, cells in enumerate(rows):
        line = " ".join(cells.get(column, "..").ljust(width) for column in range(columns))
        lines.append(f"worker {worker:<3} {line}".rstrip())
    return "\n".join(lines)


def svg_chart(timeline: ScheduleTimeline) -> str:
    """An SVG document. Each pipe has colours of its own."""
    scale = _UNIT / max(_shortest(timeline), timeline.makespan / _MOST_COLUMNS)
    width = _LEFT + timeline.makespan * scale + 10
    height = _TOP + len(timeline.spans) * _ROW + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" font-size="11">',
        f'<text x="4" y="15">{escape(timeline.program.name)}, makespan {timeline.makespan:g}</text>',
    ]
    for worker, spans in enumerate(timeline.spans):
        y = _TOP + worker * _ROW
        parts.append(f'<text x="4" y="{y + 18}">worker {worker}</text>')
        parts += [_rectangle(timeline, worker, span, y, scale) for span in spans]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rectangle(timeline: ScheduleTimeline, worker: int, span: Span, y: int, scale: float) -> str:
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    colours = _COLOURS[span.action.kind]
    colour = colours[span.action.pipe % len(colours)]
    return (
        f"<g><title>{escape(str(span.action))}: {span.start:g} to {span.end:g}</title>"
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 4}" fill="{colour}" stroke="#444"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + 17}" text-anchor="middle">'
        f"{escape(_label(timeline, worker, span.action)[1:])}</text></g>"
    )


def _shortest(timeline: ScheduleTimeline) -> float:
    durations = (span.end - span.start for spans in timeline.spans for span in spans)
    return min((duration for duration in durations if duration > 0), default=1.0)


def _column(time: float) -> int:
    """The nearest one. Halves go up, so that actions at least as long as a column never share one."""
    return math.floor(time + 0.5 + 1e-9)


def _label(timeline: ScheduleTimeline, worker: int, action: Action) -> str:
    program = timeline.program
    stages = [stage for pipe, stage in program.stages_of(worker) if pipe == action.pipe]
    each = program.parts_of_micro_batch
    micro_batches = sorted({part // each for part in action.parts})
    half = "'" * (action.parts[0] % each) if len(action.parts) < each else ""
    chunk = _CHUNKS[stages.index(action.stage) % len(_CHUNKS)] if len(stages) > 1 else ""
    return f"{action.kind.value}{'+'.join(map(str, micro_batches))}{half}{chunk}"
