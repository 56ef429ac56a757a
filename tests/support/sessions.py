"""Ranks in the test's process beside a real communication service: one machine, no scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from byteps_py.config.settings import Settings
from byteps_py.errors import (
    BytePSError,
)
from byteps_py.session import Slot
from byteps_py.session.service.remote import RemoteSession
from byteps_py.system import channel
from byteps_py.system.machine import local_socket
from byteps_py.tensors import DType, TensorSpec
from support import warm

WAIT_S = 30.0
TWO = 2

#: A rank in a process of its own: takes part in what it is asked to, one word per line.
RANK = """
import sys, numpy as np
from byteps_py.system import channel
from byteps_py.session.service.remote import RemoteSession
from byteps_py.tensors import DType, TensorSpec
session = RemoteSession(channel.connect(sys.argv[1], 30), 1, 2, 30, 600)
slot, = session.declare([TensorSpec("shared", DType.FLOAT32, (3,))])
for word in sys.stdin:
    if word == "give\\n":
        np.frombuffer(slot.input, np.float32)[:] = 2
        session.hand_over(slot)
        session.wait(slot, 30)
    print("done", flush=True)
"""


@dataclass
class Service:
    """A running communication service for two ranks."""

    process: subprocess.Popen[bytes]
    settings: Settings

    @property
    def name(self) -> str:
        return local_socket(self.settings, "cs")

    def rank(self, local_rank: int, local_size: int = TWO) -> RemoteSession:
        link = channel.connect(self.name, WAIT_S)
        try:
            return RemoteSession(link, local_rank, local_size, WAIT_S, 600.0)
        except BaseException:
            link.close()
            raise


def start(*arguments: str) -> Service:
    settings = Settings(job_id=f"test-{uuid.uuid4()}", local_size=TWO)
    ours = ("BYTEPS_", "DMLC_", "PS_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environ |= {"BYTEPS_JOB_ID": settings.job_id, "BYTEPS_LOCAL_SIZE": str(TWO), "BYTEPS_LOG_LEVEL": "FATAL"}
    process = warm.Popen([sys.executable, "-m", "byteps_py.worker", *arguments], env=environ)
    return Service(process, settings)


def end(service: Service) -> None:
    service.process.terminate()
    try:
        service.process.wait(WAIT_S)
    finally:
        service.process.kill()
        service.process.wait()


def spec(name: str, count: int = 3, dtype: DType = DType.FLOAT32, **facts: object) -> TensorSpec:
    return TensorSpec(name, dtype, (count,), **facts)  # type: ignore[arg-type]


def give(session: RemoteSession, slot: Slot, value: float) -> None:
    """Hand over a round of nothing but ``value``."""
    np.frombuffer(slot.input, slot.spec.dtype.name.lower())[:] = value
    session.hand_over(slot)


def got(session: RemoteSession, slot: Slot) -> list[float]:
    session.wait(slot, WAIT_S)
    return np.frombuffer(slot.result, slot.spec.dtype.name.lower()).tolist()  # type: ignore[no-any-return]


def declare(ranks: list[RemoteSession], what: TensorSpec) -> list[Slot]:
    return [session.declare([what])[0] for session in ranks]


def sum_once_more(ranks: list[RemoteSession]) -> None:
    """The job still works."""
    slots = declare(ranks, spec(f"tensor-{uuid.uuid4()}"))
    for session, slot in zip(ranks, slots, strict=True):
        give(session, slot, 1.5)
    assert [got(session, slot) for session, slot in zip(ranks, slots, strict=True)] == [[3.0] * 3] * len(ranks)


def failure(act: Callable[[], object]) -> BytePSError:
    with pytest.raises(BytePSError) as raised:
        act()
    return raised.value
