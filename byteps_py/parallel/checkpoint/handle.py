"""The end of a save in the background. Ranks meet in the folder there, not in a collective, which would get between
those of the training.

A thread writes this rank's files, and then says so in a file; that of the first rank completes the checkpoint when all
have. It is waited for when the program ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from byteps_py.checkpoint_files import CheckpointFiles
from byteps_py.errors import CheckpointError, StallError
from byteps_py.log import logger
from byteps_py.parallel.checkpoint.ranks import Ranks

#: The first rank gives up if no rank has written a byte for so long.
_STALL_S = 300.0
_LOOK_S = 0.05


class SaveWork(Protocol):
    """What a rank writes."""

    files: CheckpointFiles

    def write(self) -> Any:
        """Write this rank's files; the result is for ``complete``."""

    def complete(self, parts: Sequence[Any]) -> None:
        """On the first rank, with the results of all."""


class SaveHandle:
    """Of ``save(…, asynchronous=True)``. All ranks call ``result()``.

    >>> SaveHandle.done_already().done()
    True
    """

    def __init__(self, folder: Path | None = None, ranks: Ranks | None = None) -> None:
        self._folder, self._ranks = folder, ranks
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.save_id = ""

    @classmethod
    def done_already(cls) -> SaveHandle:
        """Of a save that has ended."""
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
        """Whether this rank has done its part; on the first rank: whether the checkpoint is complete."""
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
    """What each rank has written, once all have. Raises CheckpointError."""
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
