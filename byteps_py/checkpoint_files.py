"""The files of a checkpoint, of ``parallel.checkpoint.save`` or of `bps checkpoint`. One that is there is complete:
`.metadata` is renamed last, and says which files belong to it; a manifest has their sizes and checksums.

    DIR/.metadata            of torch.distributed.checkpoint
    DIR/manifest-ID.json     sizes and checksums (xxh3) of .metadata and of the data of the save ID
    DIR/__ID_RANK_N.distcp   data
    DIR/.part-ID-RANK        of a save in the background that is under way: what a rank has written

A save writes beside the checkpoint that is there, and removes it after the new one is complete. Other files in the
folder stay. The next save removes what a killed one has left. Any thread.

`bps checkpoint` writes a folder of checkpoints, ``step-N`` each. One that has its name is complete:

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
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from byteps_py.errors import BytePSError, CheckpointError, UsageError
from byteps_py.system.log import logger
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
    """The path of the checkpoint of ``step``."""
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


METADATA = ".metadata"
_MANIFEST = re.compile(r"manifest-([0-9a-f]{16})\.json")
#: Also those of versions before manifests, and of torch.
_DATA = re.compile(r"__(?:([0-9a-f]{16})_)?\d+_\d+\.distcp")
_PART = re.compile(r"\.part-([0-9a-f]{16})-\d+(\.tmp)?")
_DRAFT = re.compile(r"\.(?:metadata|manifest)-([0-9a-f]{16})\.tmp")
_CHUNK_BYTES = 4 << 20

#: Of a file: bytes, checksum.
FileSum = tuple[int, str]


def file_sum(path: Path) -> FileSum:
    """Of what is in the file. Raises OSError."""
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def bytes_sum(data: bytes) -> FileSum:
    """Of a file that has these bytes."""
    return len(data), xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Of one save. ``optimizer``: the names of its class and of those that it extends; None: none was saved; empty:
    they are not known."""

    save_id: str
    metadata: FileSum
    files: Mapping[str, FileSum]
    optimizer: Sequence[str] | None

    def pack(self) -> bytes:
        """As the file has it: JSON, and a line with its checksum."""
        said = {
            "format": 1,
            "save": self.save_id,
            "metadata": self.metadata,
            "files": self.files,
            "optimizer": self.optimizer,
        }
        text = json.dumps(said, sort_keys=True).encode()
        return text + b"\n" + bytes_sum(text)[1].encode() + b"\n"

    @classmethod
    def unpack(cls, packed: bytes) -> Manifest | None:
        """None if it is damaged."""
        text, _, rest = packed.partition(b"\n")
        if rest.strip().decode(errors="replace") != bytes_sum(text)[1]:
            return None
        said = json.loads(text)
        files = {name: (size, digest) for name, (size, digest) in said["files"].items()}
        size, digest = said["metadata"]
        return cls(said["save"], (size, digest), files, said["optimizer"])


class CheckpointFiles:
    """Of the checkpoint in the folder ``path``, and of the save ``save_id`` that writes there."""

    def __init__(self, path: str | os.PathLike[str], save_id: str = "") -> None:
        self.path, self.save_id = Path(path), save_id

    # ---- writing ---------------------------------------------------------------------------------------------

    def prefix(self, rank: int) -> str:
        """Of the names of the data that a rank writes."""
        return f"__{self.save_id}_{rank}_"

    def make_folder(self) -> None:
        """Raises CheckpointError if that can't be."""
        with self.explained("written"):
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def sums(self, rank: int) -> dict[str, FileSum]:
        """Of the data that a rank has written. Raises OSError."""
        names = [name for name in os.listdir(self.path) if name.startswith(self.prefix(rank))]
        return {name: file_sum(self.path / name) for name in names}

    def commit(self, metadata: bytes, files: Mapping[str, FileSum], optimizer: Sequence[str] | None) -> None:
        """Make what was written the checkpoint, and remove the one that was there. Raises CheckpointError."""
        with self.explained("written"):
            for name, (size, _) in files.items():
                there = (self.path / name).stat().st_size if (self.path / name).exists() else -1
                if there != size:
                    raise CheckpointError(
                        f"{self.path}: the file {name} of another rank is not here, or not whole: name a folder that "
                        "all ranks reach, as on a shared file system"
                    )
            self._write_manifest(metadata, files, optimizer)
            synchronize_folder(self.path)
            self._write(f".metadata-{self.save_id}.tmp", METADATA, metadata)
            synchronize_folder(self.path)
        with contextlib.suppress(OSError):  # the checkpoint is complete; the next save tries again
            self.remove(set(self._saves()) - {self.save_id})

    def add_manifest(self) -> None:
        """Of what one process has written, with `.metadata`, to a folder that nobody reads yet. Raises OSError."""
        self._write_manifest((self.path / METADATA).read_bytes(), self.sums(0), ())

    def discard(self) -> None:
        """Remove what this save has written."""
        with contextlib.suppress(OSError):
            self.remove({self.save_id})

    def remove_rests(self, under_way: Iterable[str]) -> None:
        """Remove what killed saves have left: all but the checkpoint, and the saves that are ``under_way``."""
        with contextlib.suppress(OSError):
            held = self._current()
            if held is not None:
                self.remove(set(self._saves()) - {held.save_id, "", *under_way})
            elif not (self.path / METADATA).exists():
                self.remove(set(self._saves()) - {"", *under_way})

    def remove(self, saves: set[str]) -> None:
        """Remove the files of these saves; "": those of versions before manifests. Raises OSError."""
        for name, save in self._names():
            if save in saves:
                (self.path / name).unlink(missing_ok=True)

    # ---- a save in the background ----------------------------------------------------------------------------

    def write_part(self, rank: int, part: object) -> None:
        """Say what this rank has written, or why it could not. Raises OSError."""
        self._write(f".part-{self.save_id}-{rank}.tmp", f".part-{self.save_id}-{rank}", pickle.dumps(part))

    def read_part(self, rank: int) -> Any:
        """The record that a rank has written with ``write_part``; None if it has written none yet. Raises OSError."""
        try:
            return pickle.loads((self.path / f".part-{self.save_id}-{rank}").read_bytes())
        except FileNotFoundError:
            return None

    def written_bytes(self) -> int:
        """Of all ranks' files of this save, to see whether it goes on. Raises OSError."""
        total = 0
        for name, save in self._names():
            if save == self.save_id:
                with contextlib.suppress(FileNotFoundError):  # a draft, which its rank has just renamed
                    total += (self.path / name).stat().st_size
        return total

    # ---- reading ---------------------------------------------------------------------------------------------

    def read(self) -> tuple[bytes, Manifest | None]:
        """.metadata and the manifest of the checkpoint; None: it is of an earlier version. Raises CheckpointError if
        there is no checkpoint, or it is damaged."""
        with self.explained("read"):
            if not self.path.exists():
                raise CheckpointError(f"there is no checkpoint at {self.path}: no such folder{self._others()}")
            if not (self.path / METADATA).exists():
                raise CheckpointError(
                    f"there is no checkpoint at {self.path}: no {METADATA} is there. A save has not ended, or it is "
                    f"the folder above{self._others()}"
                )
            packed = (self.path / METADATA).read_bytes()
            found = self._manifests()
            for manifest in found.values():
                if manifest is not None and manifest.metadata == bytes_sum(packed):
                    return packed, manifest
        if found:
            intact = [name for name, manifest in found.items() if manifest is not None]
            name, why = (METADATA, "no manifest has its checksum") if intact else (min(found), "its checksum is wrong")
            raise self.damaged(name, why)
        if set(self._saves()) - {""}:
            raise self.damaged("its manifest", "it is missing")
        return packed, None

    def verify(self, names: Iterable[str], manifest: Manifest) -> None:
        """Raise CheckpointError unless these files of the manifest are as they were written."""
        with self.explained("read"):
            for name in names:
                size, due = manifest.files[name]
                try:
                    there, found = (self.path / name).stat().st_size, ""
                    if there == size:
                        there, found = file_sum(self.path / name)
                except FileNotFoundError:
                    raise self.damaged(name, "it is missing") from None
                if there != size:
                    raise self.damaged(name, f"it has {there} bytes, and had {size}")
                if found != due:
                    raise self.damaged(name, "its checksum is another one")

    def damaged(self, name: str, why: str) -> CheckpointError:
        """The error for a file that is not as it was written."""
        return CheckpointError(
            f"the checkpoint {self.path} is damaged: {name}: {why}. Nothing was loaded. Copy the checkpoint again, or "
            f"load an older one{self._others()}"
        )

    @contextlib.contextmanager
    def explained(self, what: str) -> Any:
        """An OSError inside is a CheckpointError that says what to do. ``what``: "read" or "written"."""
        try:
            yield
        except BytePSError:
            raise
        except Exception as error:
            found = os_error_in(error)
            if found is None:
                raise
            raise self.failure(found, what) from error

    def failure(self, error: OSError, what: str) -> CheckpointError:
        """The error for a user."""
        text = f"the checkpoint {self.path} can't be {what}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            text += ". Make room there, or name another folder"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            verb = "write" if what == "written" else "read"
            text += f". Name a folder in which this user (uid {os.geteuid()}) may {verb}"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST):
            text += ". A part of the path is a file: name a folder"
        if what == "written" and (self.path / METADATA).exists():
            text += ". The checkpoint that was there is as it was"
        return CheckpointError(text)

    # ---- inside ----------------------------------------------------------------------------------------------

    def _write_manifest(self, metadata: bytes, files: Mapping[str, FileSum], optimizer: Sequence[str] | None) -> None:
        manifest = Manifest(self.save_id, bytes_sum(metadata), files, optimizer)
        self._write(f".manifest-{self.save_id}.tmp", f"manifest-{self.save_id}.json", manifest.pack())

    def _write(self, draft: str, name: str, data: bytes) -> None:
        with open(self.path / draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.path / draft, self.path / name)

    def _names(self) -> list[tuple[str, str]]:
        """Files of checkpoints here, each with its save."""
        return [
            (name, match[1] or "")
            for name in os.listdir(self.path)
            for pattern in (_MANIFEST, _DATA, _PART, _DRAFT)
            if (match := pattern.fullmatch(name)) is not None
        ]

    def _saves(self) -> list[str]:
        return sorted({save for _, save in self._names()})

    def _manifests(self) -> dict[str, Manifest | None]:
        found = {}
        for name, _ in self._names():
            if _MANIFEST.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    found[name] = Manifest.unpack((self.path / name).read_bytes())
        return found

    def _current(self) -> Manifest | None:
        try:
            return self.read()[1]
        except CheckpointError as error:
            logger.debug("%s", error)
            return None

    def _others(self) -> str:
        """The newest other checkpoint beside this one."""
        with contextlib.suppress(OSError):
            beside = [one for one in self.path.absolute().parent.iterdir() if one.name != self.path.name]
            complete = [one / METADATA for one in beside if (one / METADATA).is_file()]
            if complete:
                newest = max(complete, key=lambda one: one.stat().st_mtime)
                return f". The newest other one there is {newest.parent}"
        return ""
