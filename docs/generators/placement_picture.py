"""docs/pictures/placement.svg: which machine sums how much, and what each link carries, by the formula."""

from __future__ import annotations

from drawing import BLUE, FAINT, GREEN, Drawing

from byteps_py.placement.shares import Optimum

_N, _K = 4, 2
_MODEL, _LINK = 780, 380  # pixels of M bytes: of the model, and on a link
_LEFT = 90


def svg() -> str:
    best = Optimum(_N, _K)
    cpu, gpu = float(best.shares[0]), float(best.shares[-1])  # CPU machines come first
    machines = [(f"GPU {number}", BLUE, gpu) for number in range(_N)]
    machines += [(f"CPU {number}", GREEN, cpu) for number in range(_K)]
    picture = Drawing(960, 450, f"Placement for {_N} GPU machines and {_K} CPU machines")
    picture.text(_LEFT, 34, f"Servers on {_N} GPU machines and {_K} CPU machines share the model of M bytes:")
    x = float(_LEFT)
    for name, color, share in machines:
        picture.box((x, 48, _MODEL * share, 44), fill=color)
        picture.text(x + _MODEL * share / 2, 68, name, 13, "middle")
        picture.text(x + _MODEL * share / 2, 84, f"{share:.1f} M", 13, "middle")
        x += _MODEL * share
    picture.text(_LEFT, 132, "What each machine's link carries in each direction for one sum:")
    for row, (name, color, share) in enumerate(machines):
        y = 150 + 32 * row
        picture.text(_LEFT - 10, y + 18, name, anchor="end")
        is_gpu = color == BLUE
        parts = [1.0, (_N - 2) * share] if is_gpu else [_N * share]
        x = float(_LEFT)
        for part in parts:
            picture.box((x, y, _LINK * part, 26), fill=color)
            x += _LINK * part
        said = "M: its own gradients" if is_gpu else f"{_N} · {share:.1f} M: what it sums for {_N} machines"
        picture.text(_LEFT + 8, y + 18, said, 14)
        rest = f" = M + {_N - 2} · {share:.1f} M, what it sums for others" if is_gpu else ""
        picture.text(x + 12, y + 18, f"{sum(parts):.1f} M{rest}", 13, color=FAINT)
    time, ring, servers_only = float(best.time), 2 * (_N - 1) / _N, _N / _K
    lines = (
        f"All links carry the same, so none waits for another: a sum takes {time:.1f} M/B (B: a link's rate).",
        f"A ring of the {_N} GPU machines takes {ring:.1f} M/B; servers on CPU machines alone {servers_only:.1f} M/B.",
    )
    for row, line in enumerate(lines):
        picture.text(_LEFT, 382 + 28 * row, line)
    return picture.svg()
