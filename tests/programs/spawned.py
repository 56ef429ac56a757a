"""Ranks that multiprocessing starts, twice: first they end without shutdown(), then one raises. By
tests/jobs/test_failures_python.py."""

from __future__ import annotations

import multiprocessing
import os
import sys

from byteps_py.errors import PeerLostError
from byteps_py.session import open_session
from byteps_py.tensors import DType, TensorSpec


def main(rank: int, fails: bool) -> None:
    os.environ.update(BYTEPS_LOCAL_RANK=str(rank), BYTEPS_LOCAL_SIZE="2")
    session = open_session()
    (slot,) = session.declare([TensorSpec("w", DType.FLOAT32, (3,))])
    for _ in range(2):
        session.hand_over(slot)
        session.wait(slot)
        if fails and rank == 1:
            try:
                raise ValueError("the data is bad")
            except ValueError:
                sys.exit(1)
    if not fails:
        os.write(1, f"{rank}: all have left\n".encode())


def hear(rank: int) -> None:
    try:
        main(rank, True)
    except PeerLostError as error:
        os.write(1, f"PeerLostError: {error}\n".encode())


def run(*targets: tuple[object, tuple[object, ...]]) -> list[int | None]:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=target, args=arguments) for target, arguments in targets]  # type: ignore[arg-type]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(90)
    return [rank.exitcode for rank in ranks]


if __name__ == "__main__":
    assert run((main, (0, False)), (main, (1, False))) == [0, 0]
    os.environ["BYTEPS_JOB_ID"] += "-again"
    assert run((hear, (0,)), (main, (1, True))) == [0, 1]
