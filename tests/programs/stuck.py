"""Rank 1 takes part once and is then stuck in a function of its own until rank 0 has given up waiting."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from byteps_py.errors import StallError
from byteps_py.session import Session, Slot, open_session
from byteps_py.tensors import DType, TensorSpec


def reduce(session: Session, slot: Slot) -> None:
    np.frombuffer(slot.input, np.float32)[:] = 1
    session.hand_over(slot)
    session.wait(slot)


def stuck_in_a_data_loader(flag: Path) -> None:
    deadline = time.monotonic() + 60
    while not flag.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def main(flag: Path) -> None:
    session = open_session()
    (slot,) = session.declare([TensorSpec("layer.weight", DType.FLOAT32, (4,))])
    reduce(session, slot)
    if session.rank:
        stuck_in_a_data_loader(flag)
    else:
        try:
            reduce(session, slot)
        except StallError as error:
            print("StallError:", error, flush=True)
        flag.touch()
    session.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # the job has failed on purpose
