"""parallel.checkpoint in one process: a load gives back what a save took, or raises before it has changed anything."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.breaking import command
from support.clusters import ROOT
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from byteps_py.errors import BytePSError, CheckpointError, UsageError
from byteps_py.parallel import checkpoint
from byteps_py.parallel.checkpoint.stored_pieces import StoredNames
from byteps_py.parallel.tensor.shard import Shard

PROGRAM = str(ROOT / "tests" / "programs" / "checkpoints.py")


class Counting(nn.Linear):
    """Has a state beside its tensors."""

    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def new_model(width: int = 4) -> nn.Sequential:
    return nn.Sequential(Counting(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def trained(steps: int = 1) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        model[0].count += 1
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """All of it, to be compared."""
    whole = [model.state_dict()]
    if optimizer is not None:
        whole.append({str(place): optimizer.state.get(one, {}) for place, one in enumerate(model.parameters())})
    torch.set_printoptions(profile="full", precision=17)
    return repr(whole)


def files_of(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir()}


def test_everything_comes_back_as_it_was(tmp_path: Path) -> None:
    model, optimizer = trained()
    own = optimizer.state[model[0].weight]
    own.update(count=3, scale=2.5, is_warm=True, matrices=[torch.ones(2), {"a": 1}])
    checkpoint.save(model, tmp_path, optimizer)
    again = new_model()
    other = torch.optim.AdamW(again.parameters())
    checkpoint.load(again, tmp_path, other)
    assert state_of(again, other) == state_of(model, optimizer)
    assert again[0].count == 1
    found = other.state[again[0].weight]
    assert [type(found[name]) for name in ("count", "scale", "is_warm")] == [int, float, bool]


def test_a_load_forgets_later_states(tmp_path: Path) -> None:
    model, optimizer = trained(steps=0)
    checkpoint.save(model, tmp_path, optimizer)
    before = state_of(model, optimizer)
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    checkpoint.load(model, tmp_path, optimizer)
    assert state_of(model, optimizer) == before
    assert not optimizer.state


def others() -> Iterator[tuple[str, Callable[[], nn.Module], Any, str]]:
    yield "smaller", lambda: nn.Sequential(Counting(4, 4), nn.BatchNorm1d(4)), None, "'2.bias' has no place here"
    yield "wider", lambda: new_model(5), None, r"'0.weight' has the shape \(4, 4\) there, \(5, 4\) here"
    yield "larger", lambda: new_model().append(nn.Linear(2, 2)), None, "there is no '3.weight'"
    yield "half", lambda: new_model().half(), None, "float32 there, and of torch.float16 here"
    yield "sgd", new_model, torch.optim.SGD, "the states are of AdamW, and the optimizer here is SGD"
    yield "amsgrad", new_model, lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"


@pytest.mark.parametrize(("build", "of", "message"), [pytest.param(*one[1:], id=one[0]) for one in others()])
def test_another_model_or_optimizer_is_refused(
    tmp_path: Path, build: Callable[[], nn.Module], of: Any, message: str
) -> None:
    checkpoint.save(trained()[0], tmp_path, None)
    model, optimizer = trained()
    checkpoint.save(model, tmp_path, optimizer)
    again = build()
    other = of(again.parameters()) if of is not None else None
    before = state_of(again, other)
    with pytest.raises(UsageError, match=message):
        checkpoint.load(again, tmp_path, other)
    assert state_of(again, other) == before


def test_an_optimizer_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint.save(model, tmp_path)
    with pytest.raises(UsageError, match="no optimizer was saved there"):
        checkpoint.load(model, tmp_path, optimizer)
    more = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))])
    with pytest.raises(UsageError, match=r"parameter 6 .* of shape \[3\], is not one of the model's"):
        checkpoint.save(model, tmp_path, more)


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = trained()
    folder = tmp_path / "2"
    checkpoint.save(model, tmp_path / "1", optimizer)
    checkpoint.save(model, folder, optimizer)
    again, other = trained(2)
    before = state_of(again, other)
    for name, data in files_of(folder).items():
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        for damaged in (bytes(flipped), data[: len(data) // 2], b"", None):
            (folder / name).unlink()
            if damaged is not None:
                (folder / name).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=f"The newest other one there is {tmp_path / '1'}"):
                checkpoint.load(again, folder, other)
            assert state_of(again, other) == before
            (folder / name).write_bytes(data)
    checkpoint.load(again, folder, other)
    assert state_of(again, other) == state_of(model, optimizer)


def test_a_missing_path_or_a_file_is_explained(tmp_path: Path) -> None:
    model, _ = trained()
    with pytest.raises(CheckpointError, match="no such folder"):
        checkpoint.load(model, tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"no \.metadata is there"):
        checkpoint.load(model, tmp_path)
    (tmp_path / "file").touch()
    for call in (checkpoint.save, checkpoint.load):
        with pytest.raises(CheckpointError):
            call(model, tmp_path / "file")
    with pytest.raises(CheckpointError, match="A part of the path is a file: name a folder"):
        checkpoint.save(model, tmp_path / "file" / "more")


@contextmanager
def full_disk() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_checkpoint_that_is_there(tmp_path: Path, asynchronous: bool) -> None:
    model, optimizer = trained()
    checkpoint.save(model, tmp_path, optimizer)
    saved, files = state_of(model, optimizer), files_of(tmp_path)
    later, its = trained(3)
    with full_disk(), pytest.raises(CheckpointError) as raised:
        checkpoint.save(later, tmp_path, its, asynchronous=asynchronous).result()
    assert "Make room there, or name another folder. The checkpoint that was there is as it was" in str(raised.value)
    assert files_of(tmp_path) == files
    checkpoint.load(later, tmp_path, its)
    assert state_of(later, its) == saved


def test_a_save_replaces_what_is_there_and_leaves_other_files(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint.save(model, tmp_path, optimizer)
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "__0123456789abcdef_0_0.distcp").write_text("what a killed save has left")
    later, its = trained(2)
    checkpoint.save(later, tmp_path, its)
    assert len(files_of(tmp_path)) == 4
    checkpoint.load(model, tmp_path, optimizer)
    assert state_of(model, optimizer) == state_of(later, its)


def test_in_the_background_it_saves_what_was_there_at_the_call(tmp_path: Path) -> None:
    model, optimizer = trained()
    saved = state_of(model, optimizer)
    handle = checkpoint.save(model, tmp_path, optimizer, asynchronous=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
            optimizer.state[parameter]["exp_avg"].zero_()
    handle.result()
    assert handle.done()
    checkpoint.load(model, tmp_path, optimizer)
    assert state_of(model, optimizer) == saved


def test_a_user_s_error_in_a_load_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint.save(model, tmp_path, optimizer)

    class Refusing(Counting):
        def set_extra_state(self, state: Any) -> None:
            super().set_extra_state(state)
            if state["count"]:
                raise ValueError("no")

    again = nn.Sequential(Refusing(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = state_of(again)
    with pytest.raises(ValueError, match="no"):
        checkpoint.load(again, tmp_path)
    assert state_of(again) == before


def test_pieces_of_fused_parameters_go_into_other_cuts() -> None:
    """q, k, v of 4 rows each, cut part by part for two ranks; read whole, by two ranks, and by rows."""
    stored = {}
    data = {}
    for rank in range(2):
        for start in range(2 * rank, 12, 4):
            key = f"model.w@0:{start}:{start + 2}"
            size = torch.Size((2, 3))
            properties = TensorProperties(dtype=torch.float32)
            stored[key] = TensorStorageMetadata(properties, size, [ChunkStorageMetadata(torch.Size((0, 0)), size)])
            data[key] = torch.arange(36.0).view(12, 3)[start : start + 2]
    names = StoredNames.of(stored, "here")
    whole = torch.arange(36.0).view(12, 3)
    cuts = [
        None,
        Shard(0, ((0, 2), (4, 6), (8, 10)), 12, 6),
        Shard(0, ((3, 4), (7, 8), (11, 12)), 12, 4),
        Shard(0, ((1, 11),), 12, 11),
        Shard(1, ((1, 3),), 3, 2),
    ]
    for shard in cuts:
        expected = whole if shard is None else shard.cut(whole)
        target = torch.zeros_like(expected)
        chunk = ChunkStorageMetadata(torch.Size((0, 0)), target.shape)
        assert names.shape("model.w") == (12, 3)
        for one in names.pieces("model.w", target, chunk, shard):
            part = data[one.key]
            for dim, (start, length) in enumerate(zip(one.chunk.offsets, one.chunk.sizes, strict=True)):
                part = part.narrow(dim, start, length)
            one.target.copy_(part)
        assert torch.equal(target, expected), shard
    broken = [
        ({**stored, "model.w@0:5:6": stored["model.w@0:4:6"]}, "the indices 5 to 5 of dimension 0 are there twice"),
        ({**stored, "model.w@1:1:3": stored["model.w@0:4:6"]}, "cut along dimension 0 and along dimension 1"),
        (
            {key: one for key, one in stored.items() if key != "model.w@0:4:6"},
            "the indices 4 to 5 of dimension 0 are missing",
        ),
    ]
    for entries, text in broken:
        with pytest.raises(CheckpointError, match=f"'w'.*{text}"):
            StoredNames.of(entries, "here").pieces("model.w", whole, _chunk_of(whole))


def test_a_tensor_without_all_of_its_chunks_is_refused() -> None:
    """torch would read a part of the tensor."""
    size = torch.Size((4, 3))
    chunks = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((3, 3)))]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), size, chunks)
    with pytest.raises(CheckpointError, match="'w' is damaged: the files have 9 of its 12 elements"):
        StoredNames.of({"model.w": entry}, "here")


def _chunk_of(whole: torch.Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size((0, 0)), whole.shape)


@pytest.mark.timeout(180)
def test_on_two_ranks(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "byteps_py.launch", "-np", "2", sys.executable, PROGRAM, str(tmp_path)]
    with command(*launch, OMP_NUM_THREADS="1") as job:
        assert job.end() == 0, job.text
    assert job.text.count("all right") == 2, job.text


def test_the_errors_are_this_package_s(tmp_path: Path) -> None:
    with pytest.raises(BytePSError):
        checkpoint.save(trained()[1], tmp_path)  # type: ignore[arg-type]
    shutil.rmtree(tmp_path)
    checkpoint.save(trained()[0], tmp_path)
    assert os.listdir(tmp_path)
