"""The losses of examples/llama.py in several layouts of ranks, beside one process.

    python -m benchmarks.llama_layouts [--ranks 8] [--steps 60] [--json FILE] [--picture FILE.svg]

Each layout trains the same model on the same batches in float32; the table has the largest difference of its losses
from those of one process, and the time of a step (all ranks share this machine's cores: it says nothing about speed).
The picture needs matplotlib: pip install '.[benchmarks]'.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LAYOUTS = (
    "--tp 2 --cp 2 --pp 2",
    "--tp 2 --pp 2 --dp 2",
    "--cp 2 --pp 2 --dp 2 --data zero1",
    "--tp 4 --pp 2 --no-sequence-parallel",
    "--tp 2 --cp 2 --dp 2 --data zero2",
    "--cp 2 --dp 4 --data hsdp",
    "--dp 8",
)


def losses(words: list[str], others: list[str]) -> tuple[list[float], float]:
    """The losses of all steps, and the seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "losses.json")
        command = [*words, sys.executable, str(ROOT / "examples" / "llama.py"), *others, "--json", str(file)]
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: list[float] = json.loads(file.read_text())["losses"]
        return found, (time.perf_counter() - began) / len(found)


def picture(path: str, curves: dict[str, list[float]]) -> None:
    """Draw the losses of all layouts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for width, (label, curve) in zip(range(2 * len(curves), 0, -2), curves.items(), strict=True):
        # The curves lie on each other: the later ones are thinner.
        axes.plot(range(1, len(curve) + 1), curve, linewidth=width / 1.6, alpha=0.9, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, metavar="'--tp 2 …'")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--picture", metavar="FILE.svg")
    arguments = parser.parse_args()
    common = ["--steps", str(arguments.steps), "--width", "64", "--context", "64", "--documents"]
    launch = [sys.executable, "-m", "byteps_py.launch", "-np", str(arguments.ranks)]
    curves: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    curves["one process"], step_s = losses([], common)
    print(f"{'layout':45s} {'last loss':>10s} {'difference':>11s} {'s/step':>7s}")
    print(f"{'one process':45s} {curves['one process'][-1]:10.5f} {'':11s} {step_s:7.2f}")
    for layout in arguments.layouts:
        curve, step_s = losses(launch, [*layout.split(), *common])
        difference = max(abs(one - other) for one, other in zip(curve, curves["one process"], strict=True))
        curves[layout.replace("--", "")] = curve
        rows.append({"layout": layout, "losses": curve, "difference": difference, "step_s": step_s})
        print(f"{layout:45s} {curve[-1]:10.5f} {difference:11.1e} {step_s:7.2f}", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"one_process": curves["one process"], "layouts": rows}))
    if arguments.picture:
        picture(arguments.picture, curves)


if __name__ == "__main__":
    main()
