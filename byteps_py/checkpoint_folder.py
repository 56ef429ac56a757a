"""A folder of checkpoints, ``step-N`` each: one that has its name is complete.

    DIR/step-1200/          complete, in the format of torch.distributed.checkpoint
    DIR/.writing-step-1800  begun; the next writer removes it
    DIR/.removing-step-600  the same, of one that is too old
    DIR/.lock               whose lock the writer has

A writer that is killed leaves nothing else behind. Readers need no lock. One thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from byteps_py.errors import BytePSError, CheckpointError, UsageError
from byteps_py.wording import bytes_text

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_WRITING, _REMOVING, _LOCK = ".writing-", ".removing-", ".lock"


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in ``folder``, ascending. Empty if there is no such folder.

    Raises CheckpointError if it can't be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise failure_of(folder, error) from error
    return sorted(int(found[1]) for name in names if (found := _STEP.fullmatch(name)))


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is."""
    return folder / f"step-{step}"


def os_error_in(error: BaseException) -> OSError | None:
    """The OSError that is, or has led to, ``error``: torch wraps those of its writers in errors of its own."""
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, OSError):
            return each
        each = each.__cause__ or each.__context__
    return None


def failure_of(folder: Path, error: OSError) -> CheckpointError:
    """The error for a user, which names the folder."""
    text = f"checkpoints can't be written to {folder}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        text += ". Make room there, keep fewer (--keep), or name another folder"
    return CheckpointError(text)


class CheckpointFolder:
    """The folder, for its one writer. Made if it does not exist.

    Raises UsageError if another process writes there, CheckpointError if the folder can't be used. Used in a ``with``
    block, which ends the lock.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._lock = -1
        with self._explained():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise UsageError(
                    f"another process writes checkpoints to {self.path}: wait for it, or name another folder"
                ) from None
            self._remove_rests()

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._lock)

    @property
    def steps(self) -> list[int]:
        """See ``checkpoint_steps``."""
        return checkpoint_steps(self.path)

    def check_room(self, nbytes: int) -> None:
        """Raises CheckpointError if the disk has less than ``nbytes`` left."""
        with self._explained():
            free = shutil.disk_usage(self.path).free
        if free < nbytes:
            raise CheckpointError(
                f"a checkpoint needs {bytes_text(nbytes)}, and the disk of {self.path} has {bytes_text(free)} left. "
                "Make room there, keep fewer (--keep), or name another folder"
            )

    @contextlib.contextmanager
    def new(self, step: int) -> Iterator[Path]:
        """A folder to write the checkpoint of ``step`` to. At the end of the block it gets its name; if the block
        raises, it is removed. Raises CheckpointError, also for an OSError of the block.

        The caller has synchronized the files to the disk.
        """
        draft = self.path / f"{_WRITING}step-{step}"
        try:
            with self._explained():
                draft.mkdir()
                yield draft
                synchronize_folder(draft)
                os.rename(draft, checkpoint_path(self.path, step))
                synchronize_folder(self.path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def keep(self, count: int) -> None:
        """Remove all but the newest ``count`` checkpoints, at least one. Raises CheckpointError."""
        for step in self.steps[:-count]:
            draft = self.path / f"{_REMOVING}step-{step}"
            with self._explained():
                os.rename(checkpoint_path(self.path, step), draft)
                shutil.rmtree(draft)

    def _remove_rests(self) -> None:
        for name in os.listdir(self.path):
            if name.startswith((_WRITING, _REMOVING)):
                shutil.rmtree(self.path / name)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except BytePSError:
            raise
        except OSError as error:
            raise failure_of(self.path, error) from error


def synchronize_folder(folder: Path) -> None:
    """The names in ``folder`` are on the disk afterwards."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
