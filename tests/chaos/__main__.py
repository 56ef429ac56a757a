"""``python -m tests.chaos --faults N``: the same training once with N faults and once in peace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from byteps_py.system.terminal import ProgressBar
from chaos.run import calm, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="of training, one fault in each so many")
    parser.add_argument("--hosted", action="store_true", help="the services keep the optimizer's states")
    parser.add_argument("--compression", default="", help="of gradients: int8, topk, randomk, dithering or thc")
    arguments = parser.parse_args()
    stretches = arguments.faults + 2
    with ProgressBar("faults") as bar:
        wild = run(
            stretches, arguments.seed, steps=arguments.steps, hosted=arguments.hosted,
            compression=arguments.compression, progress=lambda done: bar.update(done, stretches),
        )  # fmt: skip
    print("with faults:", *wild.lines(), sep="\n  ", flush=True)
    peace = calm(stretches, steps=arguments.steps, compression=arguments.compression)
    print("in peace:", *peace.lines(), sep="\n  ")
    print("weights:", "the same bits" if wild.digests == peace.digests else "DIFFERENT")
    return int(wild.digests != peace.digests)


if __name__ == "__main__":
    sys.exit(main())
