"""Elastic jobs of real processes: a rank is killed, machines are, one joins, one leaves; the others go on.

What comes out is, bit for bit, what one process computes that takes the same steps with the same ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from programs.elastic import digest_of
from support.breaking import Job, launch
from support.clusters import ROOT
from support.elastic_reference import Reference
from support.low_rank import Emulated
from support.threaded import contract
from torch_training import gradients

from byteps_py.launch.process_plan import free_port
from byteps_py.system import rdma_devices
from byteps_py.tensor_codec import Codec, CodecKind
from byteps_py.torch.compression import Compression

pytestmark = pytest.mark.timeout(300)  # seconds

PROGRAM = ROOT / "tests" / "programs" / "elastic.py"


def machine(
    index: int, port: int, file: Path, local_size: int = 1, **variables: str
) -> contextlib.AbstractContextManager[Job]:
    """What a user starts on GPU machine ``index`` of a job that began with three."""
    return launch(
        "--elastic",
        str(file),
        program=PROGRAM,
        DMLC_ROLE="worker",
        DMLC_WORKER_ID=str(index),
        BYTEPS_MACHINE_ID=f"m{index}",
        BYTEPS_LOCAL_SIZE=str(local_size),
        limit_s=200,  # it begins early, and some two dozen processes after it
        **addressed(port),
        **variables,
    )


def addressed(port: int) -> dict[str, str]:
    return {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": "3",
        "DMLC_NUM_SERVER": "0",
        "PS_HEARTBEAT_TIMEOUT": "10",  # nobody freezes here, but a busy machine may look like it
    }


class Training:
    """What the test tells the ranks, and hears of them."""

    def __init__(self, file: Path, codec: Codec | None = None) -> None:
        self.file = file
        self.reference = Reference(codec)
        self.machines: list[int] = []
        self.took: list[str] = []

    def tell(self, steps: int, is_last: bool = False) -> None:
        told = self.file.with_suffix(".new")
        told.write_text(f"{steps} {int(is_last)}")
        told.rename(self.file)

    def group(self, job: Job, what: str, since_s: float, were: list[int | None] | None = None) -> list[int]:
        """Wait for the next group, of which ``job`` has rank 0. Its machines. ``were``: see Reference."""
        line = job.until("group from step")
        self.took.append(f"{what}: {time.monotonic() - since_s:.2f} s")
        found = re.search(r"step (\d+): ([\d ]+)", line)
        assert found is not None, line
        assert int(found[1]) >= self.committed(job), f"lost more than the steps since the last commit: {line}"
        self.reference.go(int(found[1]), self.machines)
        self.machines = [int(count) for count in found[2].split()]
        self.reference.regroup(self.machines, were or [None] * len(self.machines))
        return self.machines

    @staticmethod
    def committed(job: Job) -> int:
        """The last step that all had committed, as far as ``job`` has been heard."""
        steps = [int(line.split()[-1]) for line in job.said if "committed is step" in line]
        return max(steps, default=0)

    def train(self, job: Job, steps: int) -> None:
        """All take so many steps more; ``job`` has rank 0."""
        goal = self.reference.step + steps
        self.tell(goal)
        line = job.until(f"after {goal} steps")
        assert line.split()[-1] == self.reference.go(goal, self.machines)


RDMA = {"DMLC_ENABLE_RDMA": "1", "BYTEPS_RDMA_TRANSPORTS": "tcp"}
needs_nixl = pytest.mark.skipif(not rdma_devices.library(), reason="NIXL is not installed")
INT8 = {"TEST_INT8": "1", "BYTEPS_FUSION_BYTES": "0", "BYTEPS_MIN_COMPRESS_BYTES": "0"}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        pytest.param({"TEST_HOSTED": "1"}, marks=pytest.mark.slow),
        pytest.param(INT8, marks=pytest.mark.long),
        pytest.param(RDMA, marks=[pytest.mark.long, needs_nixl]),
    ],
    ids=["on the ranks", "hosted", "compressed", "by RDMA"],
)
def test_one_group_after_another(variables: dict[str, str], tmp_path, record_property) -> None:
    torch.set_num_threads(1)
    codec = Codec(CodecKind.INT8) if variables is INT8 else None
    port, training = free_port(), Training(tmp_path / "told", codec)
    training.tell(0)
    with contextlib.ExitStack() as stack:
        scheduler = stack.enter_context(launch("--elastic", DMLC_ROLE="scheduler", **addressed(port)))
        jobs = [stack.enter_context(machine(i, port, training.file, 2 if i == 0 else 1, **variables)) for i in range(3)]
        assert training.group(jobs[0], "start", time.monotonic()) == [2, 1, 1]
        training.train(jobs[0], 10)

        # One rank of two, in the middle of training.
        training.tell(training.reference.step + 40)
        jobs[0].until(f"committed is step {training.reference.step + 6}")
        victim = jobs[0].pid(str(PROGRAM), BYTEPS_LOCAL_RANK="1")
        began_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        assert training.group(jobs[0], "a rank was killed", began_s) == [1, 1, 1]
        jobs[1].until("going back to the last commit")
        training.train(jobs[0], 50)

        # A machine more.
        jobs.append(stack.enter_context(machine(7, port, training.file, **variables)))
        assert training.group(jobs[0], "a machine joined, from its start", time.monotonic()) == [1, 1, 1, 1]
        training.train(jobs[0], 10)

        # The first machine, with rank 0; and another one, while one has not come back yet.
        held = jobs[3].pid(str(PROGRAM), BYTEPS_LOCAL_RANK="0")
        os.kill(held, signal.SIGSTOP)
        began_s = time.monotonic()
        jobs[0].signal(signal.SIGKILL)
        jobs[1].until("going back to the last commit")
        jobs[2].signal(signal.SIGKILL)
        jobs[2].end()
        os.kill(held, signal.SIGCONT)
        assert training.group(jobs[1], "two machines were killed, one after the other", began_s) == [1, 1]
        training.train(jobs[1], 10)

        # A machine leaves.
        began_s = time.monotonic()
        jobs[1].signal(signal.SIGTERM)
        assert training.group(jobs[3], "a machine left", began_s) == [1]
        assert jobs[1].end() == 0
        training.train(jobs[3], 10)

        training.tell(training.reference.step, is_last=True)
        jobs[3].until("rank 0 of 1 ends")
        assert jobs[3].end() == 0
        assert scheduler.end() == 0
        for job in (jobs[0], jobs[2]):
            job.end()
    record_property("took", training.took)
    print(training.took)


class LowRankReference(Reference):
    """The same, with gradients that travel as factors of low rank."""

    def __init__(self) -> None:
        super().__init__()
        low_rank = Compression.powersgd(rank=2, min_compression_rate=1.0).low_rank
        assert low_rank is not None
        self.matrices: dict[str, Emulated] = {}
        self.low_rank = low_rank

    def go(self, to: int, machines: list[int]) -> str:
        for step in range(self.step, to):
            by_rank = [gradients(self.model, rank, [step]) for rank in range(sum(machines))]
            for (name, param), *parts in zip(self.model.named_parameters(), *by_rank, strict=True):
                matrix = self.matrices.get(name)
                param.grad = contract(parts, machines, average=True) if matrix is None else matrix.mean(parts)
            self.optimizer.step()
        self.step = to
        return digest_of(self.model)

    def regroup(self, machines: list[int], were: list[int | None]) -> None:
        """``were``: as ranks, since each machine has one."""
        before, self.matrices = self.matrices, {}
        for name, param in self.model.named_parameters():
            if not self.low_rank.compresses(param):
                continue
            new = self.matrices[name] = Emulated(name, param.shape, machines, self.low_rank.rank_of(param.shape))
            if before:
                old, zeros = before[name], new.errors[0]
                new.factor, new.step = old.factor, old.step
                new.errors = [zeros if was is None else old.errors[was] for was in were]


@pytest.mark.slow
def test_what_ranks_have_not_sent_goes_on(tmp_path) -> None:
    """Factors of low rank: a machine is killed, and another one joins. Its rank has no error, the others theirs."""
    torch.set_num_threads(1)
    port, training = free_port(), Training(tmp_path / "told")
    training.reference = LowRankReference()
    training.tell(0)
    variables = {"TEST_POWERSGD": "1", "BYTEPS_FUSION_BYTES": "0"}
    with contextlib.ExitStack() as stack:
        scheduler = stack.enter_context(launch("--elastic", DMLC_ROLE="scheduler", **addressed(port)))
        jobs = [stack.enter_context(machine(i, port, training.file, **variables)) for i in range(3)]
        assert training.group(jobs[0], "start", time.monotonic()) == [1, 1, 1]
        training.train(jobs[0], 10)
        jobs[1].signal(signal.SIGKILL)
        assert training.group(jobs[0], "a machine was killed", time.monotonic(), [0, 2]) == [1, 1]
        training.train(jobs[0], 10)
        jobs.append(stack.enter_context(machine(7, port, training.file, **variables)))
        assert training.group(jobs[0], "a machine joined", time.monotonic(), [0, 1, None]) == [1, 1, 1]
        training.train(jobs[0], 10)
        training.tell(training.reference.step, is_last=True)
        for job in (jobs[0], jobs[2], jobs[3]):
            assert job.end() == 0
        assert scheduler.end() == 0
        jobs[1].end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "hosted"),
    [
        (CodecKind.INT8, ""),
        pytest.param(CodecKind.INT8, "machine", marks=pytest.mark.long),
        pytest.param(CodecKind.DITHERING_NATURAL, "", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_what_machines_have_not_sent_goes_on(kind: CodecKind, hosted: str, tmp_path) -> None:
    """With error feedback and momentum: a machine is killed, and another one joins. That one begins with zeros, and the
    others go on with what they had when they committed."""
    torch.set_num_threads(1)
    is_drawn = kind is CodecKind.DITHERING_NATURAL
    codec = Codec(kind, 7 * is_drawn, error_feedback=True, seed=3 * is_drawn, momentum=0.5)
    port, training = free_port(), Training(tmp_path / "told", codec)
    training.tell(0)
    with contextlib.ExitStack() as stack:
        scheduler = stack.enter_context(launch("--elastic", DMLC_ROLE="scheduler", **addressed(port)))
        variables = {**INT8, "TEST_FEEDBACK": "1", **({"TEST_HOSTED": hosted} if hosted else {})}
        if is_drawn:
            del variables["TEST_INT8"]
        jobs = [stack.enter_context(machine(i, port, training.file, **variables)) for i in range(3)]
        assert training.group(jobs[0], "start", time.monotonic()) == [1, 1, 1]
        training.train(jobs[0], 10)
        jobs[1].signal(signal.SIGKILL)
        assert training.group(jobs[0], "a machine was killed", time.monotonic(), [0, 2]) == [1, 1]
        training.train(jobs[0], 10)
        jobs.append(stack.enter_context(machine(7, port, training.file, **variables)))
        assert training.group(jobs[0], "a machine joined", time.monotonic(), [0, 1, None]) == [1, 1, 1]
        training.train(jobs[0], 10)
        training.tell(training.reference.step, is_last=True)
        for job in (jobs[0], jobs[2], jobs[3]):
            assert job.end() == 0
        assert scheduler.end() == 0
        jobs[1].end()
