"""A folder of checkpoints: what has its final name is complete, whatever ends the writer."""

from __future__ import annotations

import errno
import math
import os
import pickle
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from byteps_py.checkpoint.program import write_state
from byteps_py.checkpoint_files import CheckpointFolder, checkpoint_steps
from byteps_py.errors import CheckpointError, PeerLostError, ProtocolError, UsageError
from byteps_py.shadow.record import Attachment, StoredBuffer
from byteps_py.torch.gradients.whole_state import StatePiece, WholeTensor

Element = namedtuple("Element", "index")


class Elements:
    """A source of tensors: element i is i. ``fails_at``: reading from there on raises PeerLostError."""

    def __init__(self, fails_at: int = 1 << 62) -> None:
        self.fails_at = fails_at
        self.longest = 0

    def read_into(self, elements: range, target: torch.Tensor) -> None:
        if elements.stop > self.fails_at:
            raise PeerLostError("the server is gone")
        self.longest = max(self.longest, len(elements))
        target.copy_(torch.arange(elements.start, elements.stop))


def state_of(source: Elements, *shapes: tuple[int, ...]) -> dict[str, Any]:
    tensors = {
        str(number): WholeTensor(
            str(number), shape, torch.bfloat16, [StatePiece(range(math.prod(shape)), source.read_into)]
        )
        for number, shape in enumerate(shapes)
    }
    return {"model": tensors, "step": 3}


def write(folder: CheckpointFolder, step: int) -> None:
    with folder.new(step) as draft:
        (draft / "file").write_text(str(step))


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_tensors_are_read_in_pieces(tmp_path: Path) -> None:
    elements = Elements()
    state = state_of(elements, (7, 10), (33,), (), (0, 4), (2, 3, 4))
    with CheckpointFolder(tmp_path / "folder") as folder, folder.new(3) as draft:
        write_state(state, draft, piece_bytes=40)
    dcp_to_torch_save(tmp_path / "folder" / "step-3", tmp_path / "found")
    found = torch.load(tmp_path / "found", weights_only=True)
    assert elements.longest == 20
    for name, tensor in found["model"].items():
        shape = state["model"][name].shape
        assert torch.equal(tensor, torch.arange(tensor.numel()).view(shape).to(torch.bfloat16))


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path) as folder:
        write(folder, 1)
        with pytest.raises(PeerLostError), folder.new(2) as draft:
            write_state(state_of(Elements(fails_at=30), (20,), (40,)), draft, piece_bytes=40)
    assert names(tmp_path) == [".lock", "step-1"]


#: For imports of this file.
PATHS = [str(Path(__file__).parents[0]), str(Path(__file__).parents[1])]
#: Kills itself when the half is written; an earlier writer was killed while it removed an old one.
CRASHES = """
import os, signal, sys
sys.path[:0] = {tests!r}
from test_checkpoint_folder import *
class Crashing(Elements):
    def read_into(self, elements, target):
        if elements.start >= 20:
            os.kill(os.getpid(), signal.SIGKILL)
        super().read_into(elements, target)
folder = CheckpointFolder({folder!r})
write(folder, 1)
os.rename(folder.path / "step-1", folder.path / ".removing-step-1")
write(folder, 2)
with folder.new(3) as draft:
    write_state(state_of(Crashing(), (20,), (40,)), draft, piece_bytes=40)
"""


def test_a_writer_that_is_killed_leaves_complete_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    code = CRASHES.format(tests=PATHS, folder=str(path))
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert names(path) == [".lock", ".removing-step-1", ".writing-step-3", "step-2"]
    assert checkpoint_steps(path) == [2]
    with CheckpointFolder(path) as folder:
        assert names(path) == [".lock", "step-2"]
        write(folder, 3)
    assert checkpoint_steps(path) == [2, 3]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path) as folder:
        for step in (9, 10, 100, 11):
            write(folder, step)
        (tmp_path / "step-x").mkdir()
        folder.keep(2)
        assert folder.steps == [11, 100]
        folder.keep(5)
    assert names(tmp_path) == [".lock", "step-100", "step-11", "step-x"]


def test_one_writes_at_a_time(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path), pytest.raises(UsageError, match="another process writes"):
        CheckpointFolder(tmp_path)
    with CheckpointFolder(tmp_path):
        pass


FULL = """
import resource, sys
sys.path[:0] = {tests!r}
from test_checkpoint_folder import *
with CheckpointFolder({folder!r}) as folder:
    write(folder, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    try:
        with folder.new(2) as draft:
            write_state(state_of(Elements(), (2000,), (4000,)), draft)
    except CheckpointError as error:
        print(error)
"""


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    """A limit of the file's size stands for the disk's."""
    path = tmp_path / "folder"
    code = FULL.format(tests=PATHS, folder=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = f"checkpoints can't be written to {path}: {os.strerror(errno.EFBIG)}. Make room there"
    assert done.stdout.startswith(expected), done.stdout
    assert names(path) == [".lock", "step-1"]


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path) as folder:
        folder.check_room(1)
        with pytest.raises(CheckpointError, match=f"needs 1000000.0 TB, and the disk of {tmp_path} has"):
            folder.check_room(10**18)


def test_folders_that_can_not_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"can't be written to {tmp_path}/file/below: Not a directory"):
        CheckpointFolder(tmp_path / "file" / "below")
    with pytest.raises(CheckpointError, match="Not a directory"):
        checkpoint_steps(tmp_path / "file")
    assert checkpoint_steps(tmp_path / "none") == []


def test_what_a_rank_has_attached_is_plain() -> None:
    attached = Attachment(b"anything", {"0.mean": StoredBuffer("torch.float32", (1,), bytes(4))})
    assert Attachment.unpack(attached.pack()) == attached
    assert Attachment.unpack(Attachment(b"", {}).pack()) == Attachment(b"", {})
    for packed in (pickle.dumps((b"", os.system)), pickle.dumps((b"", Element(3))), b"x", pickle.dumps(7)):
        with pytest.raises(ProtocolError, match="is damaged"):
            Attachment.unpack(packed)
