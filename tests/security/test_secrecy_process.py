"""A job that says all it can: its secret, and what is made of it, stand nowhere but in the environment."""

from __future__ import annotations

import base64
import hashlib
import os
import signal
from pathlib import Path

from support.breaking import Job, arguments_of, environ_of, launch, service
from support.clusters import OURS

from byteps_py.config.settings import Settings
from byteps_py.dataplane import handshake
from byteps_py.security import auth

SECRET = "tulip Ǆ harbour %41 nineteen"  # what any way of quoting changes


def derived(settings: Settings) -> list[bytes]:
    """The secret, and what proves that somebody knows it."""
    secret = settings.secret.encode()
    control = auth.token(settings, "control")
    local = [auth.token(settings, "local", str(member)) for member in range(8)]
    key = auth.membership_key(settings)
    hashes = [hashlib.sha256(secret).digest(), key, handshake._proof_key(key)]
    return [secret, *hashes, *map(bytes.fromhex, [control, *local])]


def forms(key: bytes) -> set[bytes]:
    """As it may be written: also in the middle of something longer that is base64."""
    found = {key, key.hex().encode(), key.hex().upper().encode(), key.hex(" ").encode()}
    found |= {repr(key)[2:-1].encode(), ascii(key.decode(errors="surrogateescape"))[1:-1].encode()}
    for before in range(3):
        whole = slice(-(-before * 4 // 3), (before + len(key)) // 3 * 4)  # what depends on nothing but the key
        found |= {encode(bytes(before) + key)[whole] for encode in (base64.b64encode, base64.urlsafe_b64encode)}
    return found


def status(job: Job, pid: int, *words: str, **changes: str) -> Job:
    """What ``bps status`` says to who is where process ``pid`` is."""
    known = {name: value for name, value in environ_of(pid).items() if name.startswith(OURS)}
    with service("cli", "status", *words, **{**known, **changes}) as asking:
        asking.end()
    return asking


def test_a_secret_stands_nowhere_but_in_the_environment(tmp_path: Path) -> None:
    report, journal = tmp_path / "report", tmp_path / "journal"
    said: dict[str, bytes] = {}

    def look(job: Job) -> None:
        said["command lines"] = (
            said.get("command lines", b"") + repr([arguments_of(pid) for pid in job.pids()]).encode()
        )
        said["journal"] = said.get("journal", b"") + b"".join(path.read_bytes() for path in journal.iterdir())

    environ = {"BYTEPS_SECRET": SECRET, "BYTEPS_LOG_LEVEL": "DEBUG", "BYTEPS_JOURNAL_DIR": str(journal)}
    with launch(f"-np 1 --machines 2 --servers 1 --report {report}", "told", **environ) as job:
        job.until("0: training", "1: training")
        look(job)
        rank = job.pid("told", DMLC_WORKER_ID="0")
        keys = derived(Settings.from_env(environ_of(rank)))
        os.kill(job.pid("byteps_py.scheduler"), signal.SIGKILL)
        job.until("is back after")
        said["status"] = status(job, rank).text.encode()
        said["status as JSON"] = status(job, rank, "--json").text.encode()
        said["status for a stranger"] = status(job, rank, BYTEPS_SECRET="a rose is a rose").text.encode()
        look(job)
        assert job.end() == 0
    said |= {"report": report.read_bytes(), "output": job.text.encode()}
    # All of it is there to be looked at.
    for where, what in {"command lines": b"byteps_py.server", "journal": b"127.0.0.1", "status": b"running",
                        "status as JSON": b'"running"', "status for a stranger": b"SECRET", "report": b"resident_bytes",
                        "output": b"DEBUG"}.items():  # fmt: skip
        assert what in said[where], (where, said[where])
    for where, text in said.items():
        assert b"PRIVATE KEY" not in text, where
        for number, key in enumerate(keys):
            assert not [form for form in forms(key) if form in text], (where, number)
