"""Where secrets are, and where they are not; who may read what."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from byteps_py.cli import __main__ as cli
from byteps_py.config.settings import Settings
from byteps_py.errors import ConfigurationError, JournalError, ProtocolError
from byteps_py.scheduler.member_links import journal
from byteps_py.security import auth, tls
from byteps_py.system.channel import Listener
from byteps_py.system.shm import Segment

ROOT = Path(__file__).parents[2]
SECRET = "a secret of the cluster"
SOURCES = sorted(
    path for folder in ("byteps_py", "server", "worker", "proto") for path in (ROOT / folder).rglob("*.py")
)
# May run what they are given.
DANGEROUS = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def trees(*words: str) -> Iterator[tuple[Path, ast.Module]]:
    """Of the sources that contain one of these words, in any case: reading the trees of all takes seconds."""
    for path in SOURCES:
        text = path.read_text()
        if any(word in text.lower() for word in words):
            yield path, ast.parse(text)


def test_only_broadcast_objects_are_unpickled() -> None:
    users = {str(path.relative_to(ROOT)) for path, tree in trees(*DANGEROUS) if DANGEROUS.intersection(imported(tree))}
    # The scheduler's snapshot is read from its own file, and makes objects of its own classes only: see below. What a
    # rank attaches to its record makes none of any class: see test_checkpoint_folder.py.
    assert users == {
        "byteps_py/torch/operations/broadcasts.py", "byteps_py/scheduler/member_links/journal.py",
        "byteps_py/shadow/record.py",
        # Recordings in torch's format: one writes them, the other reads plain data only, see test_span_files.py.
        "byteps_py/system/flight_dump.py", "byteps_py/tools/span_files.py",
        # torch.distributed.checkpoint's format, of a file whose path the user gives: docs/explanation/security.md.
        "byteps_py/checkpoint_files.py", "byteps_py/parallel/checkpoint/loading.py",
        "byteps_py/parallel/checkpoint/saving.py",
    }  # fmt: skip
    calls = [
        path.name
        for path, tree in trees("eval", "exec")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec")
    ]
    # The program that the launcher's command names, and the module that the user gives `bps plan`.
    assert sorted(calls) == ["module_trace.py", "warm_process.py"]


@pytest.mark.parametrize(
    "name",
    ["os system", "builtins eval", "builtins getattr", "subprocess Popen", "byteps_py.config.settings Settings",
     "byteps_py.scheduler.member_links.journal Path", "byteps_py.scheduler.member_links.journal os.system",
     "byteps_py.scheduler.member_links.journal pickle.Unpickler",
     "byteps_py.scheduler.member_links.journal pb.Register"],
)  # fmt: skip
def test_a_snapshot_makes_nothing_but_the_schedulers_own_objects(name: str) -> None:
    module, _, what = name.partition(" ")
    # Protocol 4: push both names, look the global up, call it with nothing.
    data = b"\x80\x04" + b"".join(b"\x8c" + bytes((len(text),)) + text.encode() for text in (module, what))
    with pytest.raises(JournalError, match="is not allowed in a snapshot"):
        journal.thaw(data + b"\x93)R.")


def test_proofs_are_compared_in_constant_time() -> None:
    """Nothing that is a proof, a token or a secret stands beside == or !=. Tokens in byteps_py/parallel are words,
    digests in byteps_py/tools are of tensors."""
    words = ("proof", "token", "secret", "digest")
    for path, tree in trees(*words):
        for node in ast.walk(tree) if not {"parallel", "tools"} & set(path.parts) else ():
            if isinstance(node, ast.Compare) and any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
                sides = [side for side in (node.left, *node.comparators) if not isinstance(side, ast.Constant)]
                text = " ".join(map(ast.unparse, sides)).lower()
                assert not any(word in text for word in words), f"{path.name}: {text}"


def test_nothing_that_is_printed_shows_a_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(secret=SECRET)
    credentials = tls.credentials(auth.membership_key(settings))
    for text in (settings.describe(), repr(settings), str(settings), repr(credentials), str(credentials)):
        assert SECRET not in text
        assert "PRIVATE KEY" not in text
    monkeypatch.setenv("BYTEPS_SECRET", SECRET)
    assert cli.main(["env"]) == 0
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err
    for environ in (
        {"BYTEPS_SECRET": SECRET + "\udcff"},  # not UTF-8
        {"BYTEPS_SECRET": SECRET, "DMLC_NUM_WORKER": "many"},
        {"BYTEPS_SECRET": SECRET, "BYTEPS_LOCAL_RANK": "5"},
    ):
        with pytest.raises(ConfigurationError) as caught:
            Settings.from_env(environ)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", b" \n", None])
def test_a_secret_file_that_is_none_is_explained(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="BYTEPS_SECRET_FILE="):
        Settings.from_env({"BYTEPS_SECRET_FILE": str(path)})


def test_a_secret_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    for mode in (0o600, 0o400):
        path.chmod(mode)
        assert Settings.from_env({"BYTEPS_SECRET_FILE": str(path)}).secret == SECRET


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o640, 0o660, 0o666, 0o620])
def test_a_secret_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(mode)
    link = tmp_path / "link"
    link.symlink_to(path)
    for name in (path, link):
        with pytest.raises(ConfigurationError, match=rf"has mode {mode:04o}, so other users .* chmod 600 {name} "):
            Settings.from_env({"BYTEPS_SECRET_FILE": str(name)})


def test_a_fifo_in_place_of_the_secret_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "secret", 0o600)
    with pytest.raises(ConfigurationError, match="is empty"):
        Settings.from_env({"BYTEPS_SECRET_FILE": str(tmp_path / "secret")})


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount, or give a file away")
def test_secrets_of_containers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o440)
    os.chown(path, 12345, os.getgid())  # as Kubernetes does with fsGroup
    assert Settings.from_env({"BYTEPS_SECRET_FILE": str(path)}).secret == SECRET
    path.chmod(0o444)
    with pytest.raises(ConfigurationError, match="has mode 0444"):
        Settings.from_env({"BYTEPS_SECRET_FILE": str(path)})
    look = "from byteps_py.config.settings import Settings; print(Settings.from_env().secret)"
    mounted = f"mount --bind {path} {path} && exec {sys.executable} -c '{look}'"  # as Docker does
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted],
        env={**os.environ, "BYTEPS_SECRET_FILE": str(path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("this machine lets nobody mount")
    assert done.stdout == SECRET + "\n", done.stderr


def test_tokens_say_nothing_of_the_secret_and_serve_one_purpose() -> None:
    own = Settings(secret=SECRET, job_id="job")
    shown = auth.token(own, "local", "3")
    assert SECRET not in shown
    assert auth.is_valid(shown, own, "local", "3")
    for job, *parts in (("job", "control", "3"), ("other", "local", "3"), ("job", "local", "4"), ("job3", "local", "")):
        assert not auth.is_valid(shown, dataclasses.replace(own, job_id=job), *parts)
    assert not auth.is_valid("", own, "local", "3")
    assert not auth.is_valid("é\ud800", own, "local", "3")


def test_each_guess_of_a_secret_costs_memory_and_time() -> None:
    """Whoever connects sees a proof, and can try secrets at home. This is scrypt, and nothing faster."""
    own = Settings(secret=SECRET, job_id="of one cluster")
    salt = b"byteps_py cluster secret\0of one cluster"
    key = hashlib.scrypt(SECRET.encode(), salt=salt, n=1 << 14, r=8, p=1, dklen=32)
    assert auth.membership_key(own) == key
    assert auth.membership_key(dataclasses.replace(own, job_id="of another")) != key
    assert auth.membership_key(Settings(local_secret="of this machine")) == b"of this machine"
    assert auth.membership_key(Settings()) == b""


@pytest.mark.parametrize("secret", ["x", "x" * 15, "é" * 7])
def test_a_short_secret_is_refused_with_the_command_that_makes_one(secret: str) -> None:
    with pytest.raises(ConfigurationError, match=r"fewer than 16 bytes.*: head -c 32 /dev/urandom \| base64"):
        Settings.from_env({"BYTEPS_SECRET": secret})
    assert Settings(secret=secret + "x" * 16).secret


def test_shared_memory_is_its_owners_and_has_no_name() -> None:
    with contextlib.closing(Segment.create(4096)) as segment:
        status = os.fstat(segment.fd)
        assert status.st_nlink == 0
        assert status.st_uid == os.getuid()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
def test_another_user_is_turned_away_from_local_sockets() -> None:
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect('\\0' + sys.argv[1]);"
        "sys.exit(len(s.recv(100)))"
    )
    with contextlib.closing(Listener("byteps-test-of-another-user")) as listener:
        command = ["/usr/bin/env", "python3", "-c", code, listener.name]
        stranger = subprocess.Popen(command, user=65534, env={"PATH": os.defpath})
        with pytest.raises(ProtocolError, match="of user 65534 is at the other end of a socket of user 0"):
            listener.accept()
        assert stranger.wait(30) == 0
