"""`bps checkpoint`: which step is written, and what happens when servers fail. Servers are doubles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from byteps_py.checkpoint.program import HOLD_S, CheckpointOptions, CheckpointProgram
from byteps_py.checkpoint_files import CheckpointFolder, checkpoint_steps
from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, CommunicationError, ProtocolError, RendezvousError, UsageError
from byteps_py.kernels.update_rules import Method, StepKind, UpdateRule
from byteps_py.shadow import RestorablePartition, ServerDescription, ShadowReader
from byteps_py.tensors import DType
from byteps_py.wire.data_link import HeldPartition, HeldRun, ShadowDescription, ShadowPartition, ShadowRecord

SGD = StepKind(UpdateRule(Method.SGD, momentum=True), DType.FLOAT32, DType.FLOAT32)
COUNT = 6


class Training(ShadowReader):
    """A server's states: of step N, master i is N + i, its momentum 100 N + i. ``steps``: the newest one at each look,
    or an error. ``broken``: reads of these steps fail."""

    def __init__(self, *steps: int | BytePSError | None, broken: tuple[int, ...] = ()) -> None:
        super().__init__(Settings())
        self.steps: Iterator[int | BytePSError | None] = iter(steps)
        self.broken = broken
        self.holds: list[float] = []
        self.record_changes: dict[str, object] = {}

    def describe(self, hold_s: float = 0.0) -> list[ServerDescription]:
        self.holds.append(hold_s)
        found = next(self.steps)
        if isinstance(found, BytePSError):
            raise found
        description = ShadowDescription()
        if found is not None:
            common = {
                "parts": [["g", COUNT, found]], "params": {"w": ["g", 0, [2, 3], "torch.float32"]},
                "kinds": {"g": ["master_param", "momentum_buffer"]}, "groups": [{"lr": 0.5, "betas": [1, 2]}],
                "members": [[0]], "names": {}, "steps": {"g": found}, **self.record_changes,
            }  # fmt: skip
            record = ShadowRecord(run=1, step=found, rank=0, size=1, common=json.dumps(common).encode())
            part = HeldPartition(1, 0, ShadowPartition(1, 0, COUNT, SGD.code, found, "g"))
            description = ShadowDescription((HeldRun(1, found, partitions=(part,), records=(record,)),))
        return [ServerDescription("server:1", description)]

    def read_into(self, part: RestorablePartition, state: int, elements: range, view: memoryview) -> None:
        if part.step in self.broken:
            raise CommunicationError(f"elements {elements.start} to {elements.stop}: they are at another step")
        values = torch.arange(elements.start, elements.stop, dtype=torch.float32) + part.step * (100 if state else 1)
        view[:] = values.numpy().tobytes()


class Run:
    """Runs the program in ``folder``. ``said``: what it has said; ``slept``: how long it has slept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.slept: list[float] = []

    def __call__(self, training: Training, **options: object) -> None:
        given = CheckpointOptions(**options)  # type: ignore[arg-type]
        with CheckpointFolder(self.folder) as folder:
            CheckpointProgram(
                Settings(), folder, given, self.said.append, self.slept.append, lambda settings: training
            ).run()

    @property
    def steps(self) -> list[int]:
        return checkpoint_steps(self.folder)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "checkpoints")


def test_the_newest_step_is_written(run: Run, tmp_path: Path) -> None:
    training = Training(7)
    run(training)
    assert run.steps == [7]
    assert training.holds == [HOLD_S]
    dcp_to_torch_save(run.folder / "step-7", tmp_path / "found")
    found = torch.load(tmp_path / "found", weights_only=True)
    assert torch.equal(found["model"]["w"], torch.arange(6.0).view(2, 3) + 7)
    state = found["optimizer"]["state"]["w"]
    assert state.keys() == {"momentum_buffer"}
    assert torch.equal(state["momentum_buffer"], torch.arange(6.0).view(2, 3) + 700)
    assert found["optimizer"]["param_groups"] == [{"lr": 0.5, "betas": (1, 2), "params": ["w"]}]
    assert found.keys() == {"model", "optimizer", "step", "calls"}


def test_servers_that_go_on_meanwhile_are_read_again(run: Run) -> None:
    run(Training(7, 9, broken=(7,)))
    assert run.steps == [9]


def test_servers_that_always_go_on_are_an_error(run: Run) -> None:
    with pytest.raises(CommunicationError, match=r"step 9 could not be read to its end, 3 times: .*another step"):
        run(Training(7, 8, 9, broken=(7, 8, 9)))
    assert run.steps == []
    assert [path.name for path in run.folder.iterdir()] == [".lock"]


def test_a_step_is_written_once(run: Run) -> None:
    run(Training(7))
    run(Training(7))
    assert run.said[1:] == [f"step 7 is in {run.folder} already"]


def test_a_folder_of_another_training_is_refused(run: Run) -> None:
    run(Training(100))
    with pytest.raises(UsageError, match="has a checkpoint of step 100, and this training is at step 7"):
        run(Training(7), keep=1)
    assert run.steps == [100]


def test_servers_without_states(run: Run) -> None:
    with pytest.raises(CommunicationError, match="the job's servers hold no states: is its optimizer"):
        run(Training(None))
    unreadable = Training(7)
    unreadable.record_changes = {"parts": [["g", COUNT + 1, 7]]}
    with pytest.raises(CommunicationError, match=r"no step with all its states at the moment: step 7: elements 6 to 7"):
        run(unreadable)
    assert run.steps == []


@pytest.mark.parametrize("changes", [{"params": {"w": ["g"]}}, {"members": [[5]]}, {"members": []}, {"names": 3}])
def test_a_record_that_is_damaged(run: Run, changes: dict[str, object]) -> None:
    training = Training(7)
    training.record_changes = changes
    with pytest.raises(ProtocolError, match="the record of step 7 is damaged"):
        run(training)


def test_one_after_another_until_the_scheduler_ends(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run(Training(None, 1, 2, CommunicationError("a server is gone"), 4, RendezvousError("nobody")), every_s=50, keep=2)
    assert run.steps == [2, 4]
    assert "no checkpoint this time: the job's servers hold no states" in caplog.text
    assert "no checkpoint this time: a server is gone" in caplog.text
    assert run.said[-1] == "the job's scheduler does not answer any more: no further checkpoints"
    assert len(run.slept) == 5
    assert all(40 < each <= 50 for each in run.slept)


def test_a_scheduler_that_was_never_there(run: Run) -> None:
    with pytest.raises(RendezvousError):
        run(Training(RendezvousError("nobody")), every_s=50)
