"""What the ranks of a run write down, as they write it."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.goodput.training import Task


class Notes:
    """Of one run."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._read = dict.fromkeys(range(task.ranks), 0)
        self.of: dict[int, list[dict[str, Any]]] = defaultdict(list)

    def read(self) -> None:
        for rank, start in self._read.items():
            path = Path(self._task.folder) / f"{rank}.jsonl"
            if path.exists():
                with path.open("rb") as file:
                    file.seek(start)
                    text = file.read()
                whole = text[: text.rfind(b"\n") + 1]
                self._read[rank] += len(whole)
                self.of[rank] += map(json.loads, whole.splitlines())

    def finished(self) -> dict[int, float]:
        """When each step was made by all ranks that have made it, for the first time; also while some still do. No
        later than the step after it: with torchft, a rank that comes back notes its first step late."""
        first: dict[int, dict[int, float]] = defaultdict(dict)
        for rank, notes in self.of.items():
            for note in notes:
                if note["what"] == "step":
                    first[note["step"]].setdefault(rank, note["at"])
        found: dict[int, float] = {}
        until_s = math.inf
        for step in sorted(first, reverse=True):
            until_s = found[step] = min(until_s, max(first[step].values()))
        return dict(sorted(found.items()))

    def pids(self) -> list[int]:
        """The processes that are ranks, or were the last."""
        latest = {rank: note["pid"] for rank, notes in self.of.items() for note in notes if note["what"] == "ready"}
        return [latest[rank] for rank in sorted(latest)]
