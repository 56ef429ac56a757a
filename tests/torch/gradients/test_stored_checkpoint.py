"""A damaged checkpoint of `bps checkpoint` is refused by the file's name, and the older one that is intact is named."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from byteps_py.checkpoint.program import write_state
from byteps_py.errors import CheckpointError, UsageError
from byteps_py.torch.gradients.hosted.restore import _check_shapes, _StoredCheckpoint

FILES = (".metadata", "*.distcp", "manifest-*.json")
GO_ON = r"Nothing was loaded\. .*Step 1 there is intact: move step-3 away"


def write(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / f"step-{step}").mkdir(parents=True)
        write_state({"model": {"w": torch.arange(3.0) + step}}, folder / f"step-{step}")


def write_without_manifest(folder: Path, *steps: int) -> None:
    """As versions before manifests did."""
    for step in steps:
        state_dict_saver.save({"model.w": torch.ones(3)}, checkpoint_id=folder / f"step-{step}", no_dist=True)


def flip(path: Path, at: int) -> None:
    """One bit of the byte ``at``."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_an_intact_one_is_read(tmp_path: Path) -> None:
    write(tmp_path, 3)
    checkpoint = _StoredCheckpoint(tmp_path, 3)
    assert torch.equal(checkpoint.values("model.")["w"], torch.arange(3.0) + 3)
    assert len(list((tmp_path / "step-3").iterdir())) == len(FILES)


@pytest.mark.parametrize("pattern", FILES)
def test_a_flipped_bit_names_the_file_and_the_older_step(tmp_path: Path, pattern: str) -> None:
    """Step 2 is damaged, too, in its data."""
    write(tmp_path, 1, 2, 3)
    (older,) = (tmp_path / "step-2").glob(FILES[1])
    flip(older, older.stat().st_size // 2)
    (path,) = (tmp_path / "step-3").glob(pattern)
    intact = path.read_bytes()
    for at in (0, len(intact) // 3, len(intact) // 2, len(intact) - 2):
        flip(path, at)
        with pytest.raises(CheckpointError, match=rf"{path.name}.*checksum.*{GO_ON}"):
            _StoredCheckpoint(tmp_path, 3)
        path.write_bytes(intact)
    _StoredCheckpoint(tmp_path, 3)


@pytest.mark.parametrize("pattern", FILES)
@pytest.mark.parametrize("size", [0, 10, None])
def test_a_file_that_is_short_or_missing(tmp_path: Path, pattern: str, size: int | None) -> None:
    write(tmp_path, 1, 3)
    (path,) = (tmp_path / "step-3").glob(pattern)
    if size is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"Step 1 there is intact: move step-3 away"):
        _StoredCheckpoint(tmp_path, 3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("size", [0, 10, None])
def test_one_without_a_manifest(tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int | None) -> None:
    write_without_manifest(tmp_path, 1, 2, 3)
    checkpoint = _StoredCheckpoint(tmp_path, 3)
    assert torch.equal(checkpoint.values("model.")["w"], torch.ones(3))
    assert caplog.text.count("step-3 has no manifest: its files are not verified") == 1
    (tmp_path / "step-2" / ".metadata").write_bytes(b"")
    for damaged in (".metadata", "__0_0.distcp"):
        path = tmp_path / "step-3" / damaged
        data = path.read_bytes()
        if size is None:
            path.unlink()
        else:
            path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"Step 1 there is intact: move step-3 away"):
            _StoredCheckpoint(tmp_path, 3)
        path.write_bytes(data)


def of_another_save(folder: Path) -> None:
    (path,) = (folder / "step-3").glob(FILES[0])
    shutil.copy(folder / "step-1" / path.name, path)


def without_its_step(folder: Path) -> None:
    shutil.rmtree(folder / "step-3")
    (folder / "step-3").mkdir()


@pytest.mark.parametrize("damage", [of_another_save, without_its_step])
def test_a_folder_with_what_does_not_belong_together(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    write(tmp_path, 1, 3)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=r"Step 1 there is intact"):
        _StoredCheckpoint(tmp_path, 3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tensor_without_all_of_its_chunks_is_refused(tmp_path: Path) -> None:
    """torch would leave the rest of it as the memory was."""
    write_without_manifest(tmp_path, 3)
    path = tmp_path / "step-3" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    entry = metadata.state_dict_metadata["model.w"]
    entry.chunks = [ChunkStorageMetadata(torch.Size((0,)), torch.Size((2,)))]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"the entry 'model.w': the files have 2 of its 3 elements\. Nothing"):
        _StoredCheckpoint(tmp_path, 3)


@pytest.mark.parametrize(("size", "text"), [(4, "has it in shape"), (None, "does not have it")])
def test_tensors_of_another_model_are_refused_before_they_are_read(tmp_path: Path, size: int | None, text: str) -> None:
    write(tmp_path, 3)
    model = torch.nn.Module()
    if size is not None:
        model.register_parameter("w", torch.nn.Parameter(torch.zeros(size)))
    with pytest.raises(UsageError, match=rf"it has 'w' of shape \[3\], and the model here {text}"):
        _check_shapes(_StoredCheckpoint(tmp_path, 3), model, ("model.", "buffers.0."))
    model.register_parameter("w", torch.nn.Parameter(torch.zeros(3)))
    _check_shapes(_StoredCheckpoint(tmp_path, 3), model, ("model.", "buffers.0."))
