"""Writes checkpoints of a training from the states that servers hold, while the training goes on: the work of `bps
checkpoint`. A checkpoint has the format of torch.distributed.checkpoint, and a manifest with checksums.

``stored_state`` is the state_dict of a step. Its large tensors stay on the servers: a WholeTensor reads them in pieces,
each when it is about to be written. So the program needs memory for a piece, not for the model.

    {"model": {name: parameter or buffer},
     "optimizer": {"state": {name: {"step": …, "exp_avg": …, "master_param": …}},
                   "param_groups": [{"lr": …, "params": [name, …]}]},
     "step": N,
     "calls": of step(), which makes no step if gradients are not finite,
     "extra": {rank: the user's attachment, pickled},
     "buffers": {rank: {name: buffer}},     of ranks whose buffers differ from rank 0's
     "constants": {name: digest}}           of large buffers that are as the program has made them, and not in "model"

That is the layout of torch.distributed.checkpoint.state_dict.get_state_dict. The names are those that parameters have
in the model. States are those of the optimizer's state_dict: a parameter of 16 bits has "master_param" beside them.

One thread. The training notices nothing but that servers apply steps later while they are read.
"""

from __future__ import annotations

import dataclasses
import io
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from byteps_py.checkpoint_files import CheckpointFiles, CheckpointFolder, checkpoint_path, os_error_in
from byteps_py.config.settings import Settings
from byteps_py.errors import CommunicationError, ProtocolError, RendezvousError, UsageError
from byteps_py.shadow import NotRestorable, Restorable, ShadowReader, latest_step
from byteps_py.shadow.record import Attachment, StoredBuffer
from byteps_py.system.log import logger
from byteps_py.torch.gradients.hosted.replication import tensors_of
from byteps_py.torch.gradients.whole_state import WholeTensor, held_state

#: The keys of each rank's attachment in the checkpoint.
EXTRA, BUFFERS = "extra", "buffers"
CONSTANTS = "constants"


def stored_state(
    reader: ShadowReader, found: Restorable, before_read: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The state_dict of a step. ``before_read``: called before the attachments of ranks are read. Raises ProtocolError
    if its records are damaged, and as ShadowReader.read_attached does."""
    try:
        state = _stored_state(reader, found)
        _add_attachments(state, reader, found, before_read)
        return state
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"the record of step {found.step} is damaged: {error!r}") from error


def whole_tensors(state: Mapping[str, Any]) -> Iterator[WholeTensor]:
    """The tensors in ``state`` that are yet to be read."""
    for value in state.values():
        if isinstance(value, WholeTensor):
            yield value
        elif isinstance(value, dict):
            yield from whole_tensors(value)


def _stored_state(reader: ShadowReader, found: Restorable) -> dict[str, Any]:
    if found.commons.keys() != {()}:
        groups_text = ", ".join(str(list(ranks)) for ranks in found.commons)
        raise UsageError(
            f"the states of step {found.step} are of a model in parts, which ranks {groups_text} hold, and `bps "
            "checkpoint` writes those of a whole one: save it with parallel.checkpoint, or restore the job"
        )
    common = found.common
    model: dict[str, Any] = {}
    states: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    names: dict[str, list[str]] = common["names"]  # of those that the model knows by another name, or by several
    for given in common["params"]:
        held, known_as = held_state(reader, found, given), names.get(given, [given])
        model.update(dict.fromkeys(known_as, held.parameter))
        if entries := held.entries:
            states[known_as[0]] = entries
    order = list(common["params"])
    for group, members in zip(common["groups"], common["members"], strict=True):
        numbers = {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
        params = [names.get(order[place], [order[place]])[0] for place in members]
        groups.append({**numbers, "params": params})
    optimizer = {"state": states, "param_groups": groups}
    return {"model": model, "optimizer": optimizer, "step": found.step, "calls": common.get("calls", found.step)}


def _add_attachments(
    state: dict[str, Any], reader: ShadowReader, found: Restorable, before_read: Callable[[], None]
) -> None:
    """One rank after the other: most have the same buffers, which are kept once."""
    first: Mapping[str, StoredBuffer] = {}
    extras: dict[str, bytes] = {}
    others: dict[str, dict[str, torch.Tensor]] = {}
    for rank, record in sorted(found.records.items()):
        before_read()
        attached = Attachment.unpack(reader.read_attached(record))
        if attached.extra:
            extras[str(rank)] = attached.extra
        if not rank:
            first = attached.buffers
            state["model"].update(tensors_of(first))
            if attached.constants:
                state[CONSTANTS] = dict(attached.constants)
        elif attached.buffers != first:
            others[str(rank)] = tensors_of(attached.buffers)
    if extras:
        state[EXTRA] = extras
    if others:
        state[BUFFERS] = others


#: The bytes that are read, and written, at once; one row of a tensor may be longer.
PIECE_BYTES = 16 << 20


class PiecewisePlanner(DefaultSavePlanner):
    """Cuts the WholeTensors of a state_dict into pieces along their first dimension, and reads a piece when it is
    written.

    ``before_read``: called before each piece is read.
    """

    def __init__(self, before_read: Callable[[], None], piece_bytes: int) -> None:
        super().__init__()
        self._before_read, self._piece_bytes = before_read, piece_bytes
        self._whole: dict[str, WholeTensor] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """See DefaultSavePlanner."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._whole = {path: value for path, value in self.state_dict.items() if isinstance(value, WholeTensor)}
        self.state_dict = {**self.state_dict, **{path: one.placeholder for path, one in self._whole.items()}}

    def create_local_plan(self) -> SavePlan:
        """See DefaultSavePlanner."""
        plan = super().create_local_plan()
        items = [piece for item in plan.items for piece in self._pieces(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def _pieces(self, item: WriteItem) -> Iterator[WriteItem]:
        whole, data = self._whole.get(item.index.fqn), item.tensor_data
        if whole is None or data is None or whole.nbytes <= self._piece_bytes or not whole.shape:
            yield item
            return
        row_bytes = whole.nbytes // whole.shape[0]
        rows = max(1, self._piece_bytes // row_bytes)
        for start in range(0, whole.shape[0], rows):
            sizes = torch.Size([min(rows, whole.shape[0] - start), *whole.shape[1:]])
            offsets = torch.Size([start, *(0 for _ in whole.shape[1:])])
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
            index = MetadataIndex(item.index.fqn, offsets)
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=dataclasses.replace(data, chunk=chunk))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """See DefaultSavePlanner."""
        whole, data = self._whole.get(write_item.index.fqn), write_item.tensor_data
        if whole is None or data is None:
            found: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
            return found
        self._before_read()
        if not whole.shape:
            return whole.read()
        start = data.chunk.offsets[0]
        return whole.rows(start, start + data.chunk.sizes[0])


class ManifestWriter(FileSystemWriter):
    """Adds a manifest to the files that it writes. The checksums are those of the files, which are read once more."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
        self._files = CheckpointFiles(folder, secrets.token_hex(8))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See FileSystemWriter. The names of the files say to which save they belong."""
        return [
            dataclasses.replace(one, storage_data=dataclasses.replace(one.storage_data, prefix=self._files.prefix(0)))
            for one in super().prepare_global_plan(plans)
        ]

    def finish(self, metadata: Metadata, results: Sequence[list[WriteResult]]) -> None:
        """See FileSystemWriter."""
        super().finish(metadata, list(results))
        self._files.add_manifest()


def write_state(
    state: dict[str, Any],
    folder: Path,
    before_read: Callable[[], None] = lambda: None,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Write a state_dict to ``folder``, which is empty; its files are on the disk afterwards. WholeTensors in it are
    read then.

    before_read: called before each piece is read. piece_bytes: the most that is read at once, but for a longer row.
    Raises OSError if the disk refuses, and as ShadowReader.read_into does.
    """
    writer = ManifestWriter(folder)
    planner = PiecewisePlanner(before_read, piece_bytes)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no_dist=True says so, too
            state_dict_saver.save(state, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise _cause(error) from error


def _cause(error: CheckpointException) -> BaseException:
    """The error that is the cause. torch wraps an OSError of a file in a RuntimeError of its own."""
    causes: list[Any] = [failure for failure, _ in error.failures.values()]
    for cause in causes:
        if (found := os_error_in(cause)) is not None:
            return found
    return causes[0] if causes else RuntimeError(str(error))


#: Servers apply no steps for so long; it is renewed while they are read.
HOLD_S = 20.0
_RENEW_S = 8.0
_TRIES = 3
#: A checkpoint has this many bytes beside its tensors, for each of them.
_BESIDE_BYTES = 2048


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """``every_s``: from the beginning of one checkpoint to that of the next one; None: one is written. ``keep``: how
    many are kept; None: all. ``piece_bytes``: of the pieces that are read at once."""

    every_s: float | None = None
    keep: int | None = None
    piece_bytes: int = PIECE_BYTES


class CheckpointProgram:
    """Writes to ``folder`` the states that the servers of the job of ``settings`` hold. ``say``: prints a sentence
    once something is done. ``progress``: called with (pieces read, all pieces, what they are of) while one is written.
    """

    def __init__(
        self,
        settings: Settings,
        folder: CheckpointFolder,
        options: CheckpointOptions,
        say: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        new_reader: Callable[[Settings], ShadowReader] = ShadowReader,
        progress: Callable[[int, int, str], None] = lambda done, total, text: None,
    ) -> None:
        self._progress = progress
        self._new_reader = new_reader
        self._settings = settings
        self._folder = folder
        self._options = options
        self._say = say
        self._sleep = sleep
        self._renewed_s = 0.0

    def run(self) -> None:
        """Write one checkpoint, or one after another until the scheduler ends.

        Raises RendezvousError if there is no scheduler, CommunicationError if servers hold no complete step (with
        ``every_s``, that is a warning), ProtocolError if the ranks' records of it are damaged, CheckpointError if the
        folder can't be written, UsageError if it has checkpoints of another training.
        """
        with self._new_reader(self._settings) as reader:
            every_s = self._options.every_s
            if every_s is None:
                self._write_newest(reader)
                return
            has_met = False
            while True:
                begun_s = time.monotonic()
                try:
                    self._write_newest(reader)
                    has_met = True
                except RendezvousError:
                    if not has_met:
                        raise
                    self._say("the job's scheduler does not answer any more: no further checkpoints")
                    return
                except CommunicationError as error:
                    has_met = True  # the scheduler has said where servers are
                    logger.warning("no checkpoint this time: %s", error)
                self._sleep(max(0.0, begun_s + every_s - time.monotonic()))

    def _write_newest(self, reader: ShadowReader) -> None:
        """Write the newest step, unless it is there."""
        for tries_left in reversed(range(_TRIES)):
            found = self._newest(reader)
            steps = self._folder.steps
            if found.step in steps:
                self._say(f"step {found.step} is in {self._folder.path} already")
                return
            if steps and found.step < steps[-1]:
                raise UsageError(
                    f"{self._folder.path} has a checkpoint of step {steps[-1]}, and this training is at step "
                    f"{found.step}: it is of another training. Name a folder of its own for each"
                )
            try:
                self._write(reader, found)
            except (RendezvousError, ProtocolError):
                raise
            except CommunicationError as error:
                if not tries_left:
                    raise CommunicationError(
                        f"step {found.step} could not be read to its end, {_TRIES} times: {error}. Servers hold steps "
                        "back for a reader as long as they have memory for the sums"
                    ) from error
                logger.info("step %d could not be read to its end: %s; trying a newer one", found.step, error)
            else:
                if self._options.keep is not None:
                    self._folder.keep(self._options.keep)
                return

    def _newest(self, reader: ShadowReader) -> Restorable:
        descriptions = reader.describe(HOLD_S)
        self._renewed_s = time.monotonic()
        found = latest_step(descriptions)
        if found is None:
            raise CommunicationError(
                "the job's servers hold no states: is its optimizer DistributedOptimizer(…, shadow=True), and has it "
                "made a step?"
            )
        if isinstance(found, NotRestorable):
            raise CommunicationError(f"servers hold no step with all its states at the moment: {found.reason}")
        return found

    def _write(self, reader: ShadowReader, found: Restorable) -> None:
        begun_s = time.monotonic()
        done = total = 0

        def hold() -> None:
            nonlocal done
            self._progress(done, total, f"step {found.step}")
            done += 1
            if time.monotonic() - self._renewed_s > _RENEW_S:
                reader.describe(HOLD_S)
                self._renewed_s = time.monotonic()

        state = stored_state(reader, found, hold)
        sizes = [tensor.nbytes for tensor in whole_tensors(state)]
        total, done = sum(1 + nbytes // self._options.piece_bytes for nbytes in sizes), 0
        attached = sum(record.attached_bytes for record in found.records.values())
        self._folder.check_room(sum(sizes) + attached + _BESIDE_BYTES * len(sizes))
        with self._folder.new(found.step) as draft:
            write_state(state, draft, hold, self._options.piece_bytes)
        self._say(
            f"{checkpoint_path(self._folder.path, found.step)}: {sum(sizes) / 1e6:.1f} MB in "
            f"{time.monotonic() - begun_s:.1f} s"
        )
