"""Writes checkpoints of a training from the states that servers hold, while the training goes on: the work of `bps
checkpoint`.

One thread. The training notices nothing but that servers apply steps later while they are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from byteps_py.checkpoint.writer import PIECE_BYTES, stored_state, whole_tensors, write_state
from byteps_py.checkpoint_files import CheckpointFolder, checkpoint_path
from byteps_py.config.settings import Settings
from byteps_py.errors import CommunicationError, ProtocolError, RendezvousError, UsageError
from byteps_py.shadow import NotRestorable, Restorable, ShadowReader, latest_step
from byteps_py.system.log import logger

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
