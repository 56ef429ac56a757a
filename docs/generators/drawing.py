"""A picture as SVG: boxes, arrows and text at given places. The same calls make the same bytes."""

from __future__ import annotations

import html

INK, FAINT, PAPER = "#1f2933", "#52606d", "#ffffff"
BLUE, GREEN, ORANGE = "#dbeafe", "#dcfce7", "#ffedd5"
FONT = "font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif\""

#: (x, y, width, height)
Place = tuple[float, float, float, float]


class Drawing:
    """On white, so that it can be read on a dark page too."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{html.escape(title)}">',
            f"<title>{html.escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>',
        ]

    def box(self, place: Place, label: str = "", fill: str = PAPER) -> None:
        """With a label in its middle."""
        x, y, width, height = place
        size = f'width="{width:g}" height="{height:g}"'
        self._lines.append(f'<rect x="{x:g}" y="{y:g}" {size} rx="5" fill="{fill}" stroke="{INK}"/>')
        if label:
            self.text(x + width / 2, y + height / 2 + 5, label, anchor="middle")

    def text(self, x: float, y: float, text: str, size: int = 16, anchor: str = "start", color: str = INK) -> None:
        self._lines.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}" {FONT}>'
            f"{html.escape(text)}</text>"
        )

    def arrow(self, *points: tuple[float, float], both: bool = False, is_dashed: bool = False) -> None:
        """Along straight lines between points."""
        path = " L".join(f"{x:g},{y:g}" for x, y in points)
        start = ' marker-start="url(#tip)"' if both else ""
        dash = ' stroke-dasharray="5 4"' if is_dashed else ""
        self._lines.append(
            f'<path d="M{path}" fill="none" stroke="{INK}" stroke-width="1.5" marker-end="url(#tip)"{start}{dash}/>'
        )

    def line(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Dashed and thin: a value to compare with."""
        (x1, y1), (x2, y2) = start, end
        self._lines.append(
            f'<path d="M{x1:g},{y1:g} L{x2:g},{y2:g}" fill="none" stroke="{FAINT}" stroke-dasharray="4 3"/>'
        )

    def dot(self, x: float, y: float, fill: str) -> None:
        """A measurement among many: they may lie upon each other."""
        self._lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{fill}" stroke="{INK}" stroke-width="0.4"/>'
        )

    def number(self, x: float, y: float, number: int) -> None:
        """In a circle: a step of a way."""
        self._lines.append(f'<circle cx="{x:g}" cy="{y:g}" r="12" fill="{INK}"/>')
        self.text(x, y + 5, str(number), anchor="middle", color=PAPER)

    def svg(self) -> str:
        return "\n".join([*self._lines, "</svg>", ""])
