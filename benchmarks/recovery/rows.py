"""What is measured, and what it is to be: one Row per line of the table."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Row:
    """``bound_s``: what each of ``times_s`` is to stay within. ``more``: what else was timed or counted, by name.
    ``failures``: what went otherwise than it has to. ``same_bits``: None where there is no run without the fault to
    compare with."""

    title: str
    bound_s: float | None
    times_s: list[float] = field(default_factory=list)
    more: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failures: list[str] = field(default_factory=list)
    same_bits: bool | None = None
    remarks: set[str] = field(default_factory=set)
    load: tuple[float, float] = (0.0, 0.0)  # of the machine, before and after

    def add(self, took_s: float, **more: float) -> None:
        self.times_s.append(took_s)
        for name, value in more.items():
            self.more[name.replace("_", " ")].append(value)

    def check(self, is_so: bool, text: str) -> None:
        if not is_so:
            self.failures.append(text)

    @property
    def is_within(self) -> bool:
        return self.bound_s is None or max(self.times_s, default=0.0) <= self.bound_s

    def __str__(self) -> str:
        bound = f"{self.bound_s:6.1f}" if self.bound_s is not None else f"{'-':>6}"
        if self.times_s:
            times = f"{statistics.median(self.times_s):8.2f}{max(self.times_s):8.2f}"
        else:
            times = f"{'-':>8}{'-':>8}"
        bits = {None: "", True: "same", False: "OTHER"}[self.same_bits]
        verdict = "" if self.is_within else "MISSED"
        more = "; ".join(f"{name} {_spread(seen)}" for name, seen in self.more.items())
        return f"{self.title:<64}{len(self.times_s):4d}{times}{bound} {verdict:7}{bits:6}{more}"

    def to_json(self) -> dict[str, Any]:
        return {
            "row": self.title, "bound_s": self.bound_s, "times_s": self.times_s, "more": self.more,
            "within": self.is_within, "same_bits": self.same_bits, "failures": self.failures,
            "remarks": sorted(self.remarks), "load": self.load,
        }  # fmt: skip


def _spread(seen: list[float]) -> str:
    """Median and largest; whole numbers are counts."""
    form = "{:g}" if all(isinstance(value, int) for value in seen) else "{:.2f}"
    return f"{form} (at most {form})".format(statistics.median(seen), max(seen))


HEADER = f"{'seconds':<64}{'runs':>4}{'median':>8}{'max':>8}{'bound':>6} {'':7}{'bits':6}"
