"""``python -m tests.fuzz --inputs N [--seed S] [--targets A,B]``: N inputs, shared by all targets."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback

from . import TARGETS, fuzz


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", default=",".join(TARGETS), help="names, with commas between them")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    names = arguments.targets.split(",")
    failed = 0
    for name in names:
        began_s = time.monotonic()
        inputs = arguments.inputs // len(names)
        try:
            fuzz(TARGETS[name], inputs, arguments.seed)
        except AssertionError as error:
            failed += 1
            traceback.print_exception(error.__cause__ or error)
            print(error)
        print(f"{name}: {inputs // TARGETS[name].cost} inputs, {time.monotonic() - began_s:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    os.nice(10)
    sys.exit(main())
