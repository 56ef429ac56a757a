"""``python -m tests.support.files_of_a_step --flow gradient``: the files that someone reads who follows one step.

Runs the flow on two machines that bpslaunch emulates, in real processes, and prints for each process the product's
files whose code ran between the hook and the optimizer's step, in the order in which they were entered first. It counts
in all threads, once the flow is in its steady state, and for ten heartbeats. What happens less often may be missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "programs" / "files_of_a_step"))

from counting import Switch

from support.breaking import launch

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = TESTS / "programs" / "files_of_a_step" / "flows.py"
#: The CPU machines of each flow; of GPU machines, with one rank each, all have two.
SERVERS = {"gradient": 1, "all_reduce": 0, "gather": 0, "pipeline": 0, "hosted_shadow": 1}
#: Ten of the default heartbeat intervals.
LEAST_S = 2.0
LIMIT_S = 100.0


@dataclass(frozen=True, slots=True)
class Counted:
    """What ran while ``steps`` steps were made: files relative to the source tree, by process."""

    flow: str
    steps: int
    files: dict[str, list[str]]

    @property
    def total(self) -> int:
        """The number of different files."""
        return len({file for files in self.files.values() for file in files})

    def as_json(self) -> dict[str, Any]:
        return {"flow": self.flow, "steps": self.steps, "processes": self.files, "total": self.total}

    def lines(self) -> list[str]:
        found = []
        for process, files in self.files.items():
            found += [f"{process}: {len(files)} files", *(f"  {file}" for file in files)]
        return [*found, f"{self.flow}: {self.total} different files in {len(self.files)} processes, {self.steps} steps"]


def count(flow: str, steps: int = 20) -> Counted:
    """Raises RuntimeError if the job fails, or one of its processes has ended without a report."""
    options = f"-np 1 --machines 2 --servers {SERVERS[flow]}"
    with tempfile.TemporaryDirectory(prefix="byteps-step-files-") as name:
        folder = Path(name)
        Switch.make(folder)
        with launch(
            options, flow, str(steps), str(LEAST_S),
            program=PROGRAM, limit_s=LIMIT_S, STEP_FILES_FOLDER=name, PYTHONPATH=str(PROGRAM.parent),
        ) as job:  # fmt: skip
            status = job.end()
        counted = [line.partition(": ")[2] for line in job.said if line.startswith("counted: ")]
        if status or len(counted) != 1:
            raise RuntimeError(f"{flow}: the job ended with status {status}:\n{job.text}")
        said = sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda each: each["name"])
    files = {each["name"]: each["files"] for each in said}
    machines = [*(f"worker m{i}" for i in range(2)), *(f"server c{i}" for i in range(SERVERS[flow]))]
    expected = {"scheduler", "rank 0", "rank 1", *machines}
    if missing := expected - files.keys():
        raise RuntimeError(f"{flow}: these processes have left no report: {sorted(missing)}")
    if not all(files[f"rank {rank}"] for rank in range(2)):
        raise RuntimeError(f"{flow}: byteps_py was not imported from {TESTS.parent}: run `make install` there")
    return Counted(flow, int(counted[0]), {name: of_it for name, of_it in files.items() if of_it})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.files_of_a_step", description=__doc__)
    parser.add_argument("--flow", choices=SERVERS, required=True)
    parser.add_argument("--steps", type=int, default=20, help="to count at least, for two seconds or more (default 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be positive")
    counted = count(arguments.flow, arguments.steps)
    print(*counted.lines(), sep="\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(counted.as_json(), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
