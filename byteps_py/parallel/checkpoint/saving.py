"""``save``: all ranks plan together, each writes its entries, and the first completes the checkpoint.

In the background, a thread writes this rank's files, and then says so in a file; that of the first rank completes the
checkpoint when all have. So ranks meet in the folder, not in a collective, which would get between those of the
training. The thread is waited for when the program ends.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from byteps_py.checkpoint_files import CheckpointFiles, FileSum
from byteps_py.errors import CheckpointError, StallError
from byteps_py.parallel.checkpoint.contents import MODEL, ModelContents, OptimizerStates, contents_of
from byteps_py.parallel.checkpoint.copies import check_saved
from byteps_py.parallel.checkpoint.ranks import Ranks
from byteps_py.parallel.pipe.pipeline import Pipeline
from byteps_py.system.log import logger
from byteps_py.wording import bytes_text


def save(
    model: nn.Module | Pipeline,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    asynchronous: bool = False,
) -> SaveHandle:
    """Write the parameters and buffers of ``model`` to the directory ``path``, which all ranks reach, and the states of
    ``optimizer``.

        save(model, "checkpoint/1000", optimizer)

    A checkpoint there is replaced once the new one is complete: after an error, it is as it was. Other files there
    stay. Of buffers that differ between copies of the model (statistics of BatchNorm), the first rank's are saved.

    Args:
        model: the part of this rank: cut by ``tensor.parallelize``, FSDP2, both or none; or a pipeline.
        path: of a directory.
        optimizer: of this rank's parameters; a DistributedOptimizer, hosted or not, a ZeroRedundancyOptimizer, and that
            of ``sharding.shard``, too. Its states are saved, its hyperparameters are not.
        group: the ranks that call this; default: all.
        asynchronous: return when all is copied to host memory; a thread writes it. All ranks call ``result()`` of the
            handle before they rely on the checkpoint.

    Returns a SaveHandle; it is done unless ``asynchronous``. Raises, on all ranks alike: UsageError for an optimizer
    with parameters that the model does not have, UnsupportedError for states that can't be saved, MismatchError if
    copies of a parameter differ between ranks (see ``check_copies``), and CheckpointError if the folder can't be
    written, or the disk is full.
    """
    ranks = Ranks.of(group)
    folder = Path(path).absolute()
    finish_earlier(folder)
    files = CheckpointFiles(path, ranks.from_first(secrets.token_hex(8)))
    contents, states = ranks.together(lambda: contents_of(model, optimizer, ranks))
    if states is not None:
        states.finish()
    if (text := check_saved(ranks, contents)) is not None and ranks.rank == 0:
        logger.warning("%s: copies of a %s; the checkpoint has the first rank's", path, text)
    entries = ranks.together(lambda: _entries(contents, states))
    plan, planner, metadata = _planned(ranks, files, entries, {MODEL + name for name in contents.buffers})
    family = states.family if states is not None else None
    work = SaveWork(ranks, files, plan, planner, metadata, family)
    if asynchronous:
        ranks.together(work.stage)
        return SaveHandle.start(folder, ranks, work)
    try:
        written = ranks.together(work.write)
        parts = ranks.gathered_on_first(written)
        ranks.together(lambda: work.complete(parts) if parts is not None and ranks.rank == 0 else None)
    except BaseException:
        files.discard()
        raise
    return SaveHandle.completed()


def _entries(contents: ModelContents, states: OptimizerStates | None) -> dict[str, Any]:
    return contents.entries() | (states.entries(states.named()) if states is not None else {})


def _planned(
    ranks: Ranks, files: CheckpointFiles, entries: dict[str, Any], buffers: set[str]
) -> tuple[SavePlan, DefaultSavePlanner, Metadata | None]:
    """The plan of the entries that this rank writes, and on the first rank of those that all write. Raises
    CheckpointError."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(entries, None, ranks.rank == 0)
    local = ranks.together(planner.create_local_plan)
    told = ranks.gathered_on_first((local, buffers))
    metadata: Metadata | None = None
    plans: list[SavePlan] | None = None

    def plan_all() -> None:
        nonlocal metadata, plans
        if ranks.rank or told is None:
            return
        files.make_folder()
        files.remove_rests(under_way(files.path.absolute()))
        plans, metadata = planner.create_global_plan(_first_buffers(told))
        metadata.planner_data = {key: (key,) for key in metadata.state_dict_metadata}
        _check_room(files, plans)
        writer = FileSystemWriter(files.path)
        plans = [
            dataclasses.replace(one, storage_data=dataclasses.replace(one.storage_data, prefix=files.prefix(rank)))
            for rank, one in enumerate(writer.prepare_global_plan(plans))
        ]

    ranks.together(plan_all)
    return planner.finish_plan(ranks.scattered(plans)), planner, metadata


def _first_buffers(told: Sequence[tuple[SavePlan, set[str]]]) -> list[SavePlan]:
    """The ranks' plans, with each buffer in the plan of the first rank that has it."""
    seen: set[MetadataIndex] = set()
    plans = []
    for plan, buffers in told:
        items = [one for one in plan.items if one.index.fqn not in buffers or one.index not in seen]
        seen |= {one.index for one in items if one.index.fqn in buffers}
        plans.append(dataclasses.replace(plan, items=items))
    return plans


def _check_room(files: CheckpointFiles, plans: Sequence[SavePlan]) -> None:
    """Raise CheckpointError if the disk has no room for the entries that the ranks are about to write."""
    needed = 0
    for item in (item for plan in plans for item in plan.items):
        if (data := item.tensor_data) is not None:
            needed += data.chunk.sizes.numel() * data.properties.dtype.itemsize
    with files.explained("written"):
        free = shutil.disk_usage(files.path).free
    if free < needed:
        raise CheckpointError(
            f"the checkpoint {files.path} needs {bytes_text(needed)}, and the disk has {bytes_text(free)} left. Make "
            "room there, or name another folder. Nothing was written"
        )


class _StagedPlanner(DefaultSavePlanner):
    """Writes copies that were made before."""

    def __init__(self, staged: dict[MetadataIndex, torch.Tensor | io.BytesIO]) -> None:
        super().__init__(flatten_state_dict=False)
        self._staged = staged

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """See DefaultSavePlanner."""
        return self._staged[write_item.index]


class SaveWork:
    """The entries that this rank writes. ``metadata``: on the first rank."""

    def __init__(
        self,
        ranks: Ranks,
        files: CheckpointFiles,
        plan: SavePlan,
        planner: DefaultSavePlanner,
        metadata: Metadata | None,
        family: list[str] | None,
    ) -> None:
        self.files, self._ranks = files, ranks
        self._plan, self._planner, self._metadata, self._family = plan, planner, metadata, family

    def stage(self) -> None:
        """Copy the entries to be written, so that training may go on."""
        staged: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}
        for item in self._plan.items:
            data = self._planner.resolve_data(item)
            if isinstance(data, torch.Tensor):
                data = data.detach()
                data = data.clone() if data.device.type == "cpu" else data.cpu()
            staged[item.index] = data
        self._planner = _StagedPlanner(staged)

    def write(self) -> tuple[list[WriteResult], dict[str, FileSum]]:
        """Write to files that belong to no checkpoint yet. Raises CheckpointError."""
        with self.files.explained("written"):
            if not self.files.path.is_dir():
                raise CheckpointError(
                    f"the folder {self.files.path}, which the first rank has made, is not here: name a folder that all "
                    "ranks reach, as on a shared file system"
                )
            if not self._plan.items:
                return [], {}
            writer = FileSystemWriter(self.files.path, single_file_per_rank=True, sync_files=True)
            results: list[WriteResult] = writer.write_data(self._plan, self._planner).value()
            return results, self.files.sums(self._ranks.rank)

    def complete(self, parts: Sequence[tuple[list[WriteResult], dict[str, FileSum]]]) -> None:
        """On the first rank, when all have written: make the checkpoint. Raises CheckpointError."""
        metadata = self._metadata
        if metadata is None:
            raise CheckpointError("only the first rank completes a checkpoint")
        metadata.storage_data = {one.index: one.storage_data for results, _ in parts for one in results}
        metadata.storage_meta = FileSystemWriter(self.files.path).storage_meta()
        sums = {name: each for _, files in parts for name, each in files.items()}
        self.files.commit(pickle.dumps(metadata), sums, self._family)


# ---- in the background ---------------------------------------------------------------------------------------------


#: The first rank gives up if no rank has written a byte for so long.
_STALL_S = 300.0
_LOOK_S = 0.05


class SaveHandle:
    """The handle that ``save(…, asynchronous=True)`` returns. All ranks call ``result()``.

    >>> SaveHandle.completed().done()
    True
    """

    def __init__(self, folder: Path | None = None, ranks: Ranks | None = None) -> None:
        self._folder, self._ranks = folder, ranks
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.save_id = ""

    @classmethod
    def completed(cls) -> SaveHandle:
        """A handle of a save that has ended."""
        return cls()

    @classmethod
    def start(cls, folder: Path, ranks: Ranks, work: SaveWork) -> SaveHandle:
        """Begin to write."""
        handle = cls(folder, ranks)
        handle.save_id = work.files.save_id
        handle._thread = threading.Thread(target=handle._run, args=(work,), name="byteps-checkpoint")
        _UNDER_WAY[folder] = handle
        handle._thread.start()
        return handle

    def done(self) -> bool:
        """True if this rank has done its part; on the first rank: if the checkpoint is complete."""
        return self._thread is None or not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete. All ranks call it. Raises CheckpointError on all ranks if one of them
        could not write; StallError after ``timeout`` seconds on this rank (default: while ranks write)."""
        ranks, thread = self._ranks, self._thread
        if ranks is None or thread is None:
            return
        thread.join(timeout)
        late = StallError(f"the checkpoint {self._folder} is not complete after {timeout:g} s") if timeout else None
        ranks.agree(late if thread.is_alive() else None)
        self._ranks = None
        if self._folder is not None and _UNDER_WAY.get(self._folder) is self:
            del _UNDER_WAY[self._folder]
        ranks.agree(self._error)

    def _run(self, work: SaveWork) -> None:
        files, ranks = work.files, self._ranks
        if ranks is None:
            return
        try:
            try:
                part = work.write()
            except Exception as error:
                if ranks.size > 1:
                    files.write_part(ranks.rank, str(error))
                raise
            if ranks.size > 1:
                files.write_part(ranks.rank, (part,))
            if ranks.rank == 0:
                work.complete([part] if ranks.size == 1 else _parts(files, ranks))
                for rank in range(ranks.size):
                    (files.path / f".part-{files.save_id}-{rank}").unlink(missing_ok=True)
        except Exception as error:  # result() raises it
            self._error = error
            logger.warning("a checkpoint in the background has failed: %s", error)
            if ranks.rank == 0:
                files.discard()


def _parts(files: CheckpointFiles, ranks: Ranks) -> list[Any]:
    """The results of each rank, once all have written. Raises CheckpointError."""
    found: dict[int, Any] = {}
    grown, since_s = -1, time.monotonic()
    while len(found) < ranks.size:
        for rank in set(range(ranks.size)) - set(found):
            part = files.read_part(rank)
            if isinstance(part, str):
                raise CheckpointError(f"rank {ranks.names[rank]}: {part}")
            if part is not None:
                found[rank] = part[0]
        written = files.written_bytes()
        if written != grown:
            grown, since_s = written, time.monotonic()
        if time.monotonic() - since_s > _STALL_S:
            missing = min(set(range(ranks.size)) - set(found))
            raise CheckpointError(
                f"{files.path}: rank {ranks.names[missing]} has not written its part of the checkpoint, and nothing "
                f"has come for {_STALL_S:g} s. Does it reach the same folder?"
            )
        time.sleep(_LOOK_S)
    return [found[rank] for rank in range(ranks.size)]


_UNDER_WAY: dict[Path, SaveHandle] = {}


def under_way(folder: Path) -> list[str]:
    """The saves in the background to a folder."""
    return [handle.save_id for path, handle in _UNDER_WAY.items() if path == folder]


def finish_earlier(folder: Path) -> None:
    """Wait for a save in the background to the same folder. All ranks call it. Its error is a warning: a save or load
    that comes after it has its own."""
    handle = _UNDER_WAY.get(folder)
    if handle is not None:
        try:
            handle.result()
        except CheckpointError as error:
            logger.warning("the save before this one has failed: %s", error)
