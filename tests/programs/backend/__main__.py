"""A rank that runs features one after the other, those whose names contain one of the given words, else all.

Each ends with a line ``RANK: FEATURE: done``, or the process with an exception. Started by bpslaunch, or by torchrun.
TEST_CORES: as many cores as it is to believe in. TEST_DEVICE: see cases.py.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

import cases  # noqa: F401  (the default device)

import byteps_py.torch as bps
from backend.common import FEATURES
from byteps_py.torch.collectives import router

MODULES = ("reductions", "collectives", "joins", "mistakes", "as_gloo", "training", "parallel", "pipelines")
STUCK_S = 50  # before the group's timeout ends the job


def main() -> None:
    torch.set_num_threads(1)
    router.CORES = int(os.environ.get("TEST_CORES", router.CORES))
    dist.init_process_group("byteps", timeout=timedelta(seconds=60))
    bps.init()
    words = sys.argv[1:]
    for module in MODULES:
        importlib.import_module(f"backend.{module}")
    for name, run in FEATURES.items():
        if not words or any(word in name for word in words):
            began = time.monotonic()
            faulthandler.dump_traceback_later(STUCK_S)
            run()
            faulthandler.cancel_dump_traceback_later()
            os.write(1, f"{dist.get_rank()}: {name}: done in {time.monotonic() - began:.2f} s\n".encode())
    dist.destroy_process_group()
    bps.shutdown()


if __name__ == "__main__":
    main()
