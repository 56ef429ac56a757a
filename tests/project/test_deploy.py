"""The images and the compose file. What needs a Docker engine is skipped, with the reason, where there is none.

The cluster is built and run from a copy of the build context, so that nothing of this machine (wheels, secret)
comes into the checkout. The images stay: they are what makes the next build short.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from numba.core.caching import CacheImpl
from packaging.requirements import Requirement
from support import breaking
from support.documents import Page, at_own_places, commands_of, shell

from byteps_py.kernels import __main__ as compile_kernels
from byteps_py.kernels.jit import numba_kernels
from byteps_py.launch.process_plan import free_port
from byteps_py.tensors import DType, Op

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ALLOWED_IN_CONTEXT = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
SERVICES = {"scheduler", "server-0", "server-1", "worker-0", "worker-1"}
PAGE = Page(ROOT / "docs" / "howto" / "containers.md")
BASE_IMAGE = "python:3.11-slim"
BUILD_LIMIT_S = 1500.0

# Every kernel comes from the cache, although the image is mounted read-only and its user may write nowhere else.
FROM_CACHE = """
from byteps_py.kernels.reduction import prepare_all
kernels = prepare_all()
print(len(kernels) > 0 and not any(sum(kernel.stats.cache_misses.values()) for kernel in kernels))
"""

# Stands in for pip: says what it was asked for, and leaves a wheel where one was asked for.
PIP = """#!/bin/bash
echo "pip $*"
while [ $# -gt 0 ]; do
    case "$1" in
        -c|-r) test -s "$2" || exit 1 ;;
        -w) mkdir -p "$2" && touch "$2/byteps_py.whl" ;;
        *.whl) test -f "$1" || exit 1 ;;
    esac
    shift
done
"""


def stages() -> dict[str, list[str]]:
    """The instructions of each stage of the Dockerfile, without comments; continued lines are one."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            name = match[2]
            found[name] = []
        found[name].append(line)
    return found


def lineage(name: str) -> list[str]:
    """The instructions that make stage ``name``, with those of the stages that it builds on or copies from."""
    own = stages()[name]
    found = list(own)
    for line in own:
        match = re.match(r"FROM (\S+)|COPY --from=(\S+)", line)
        if match and (source := match[1] or match[2]) in stages():
            found = lineage(source) + found
    return found


class DryBuild:
    """Builds stages as an engine would, each in a folder of its own below ``root``, from the Dockerfile's own lines.

    Absolute paths of the image are moved to that folder. The Python is this one; pip and useradd only say what they
    were asked for, in ``output``.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._commands = root / "commands"
        self._commands.mkdir()
        for name in ("useradd", "pip"):
            _put_in_place_of_pip(self._commands / name)
        self._built: dict[str, dict[str, str]] = {}
        self.output = ""

    def stage(self, name: str) -> dict[str, str]:
        """The variables of this stage, which is built unless it was."""
        if name in self._built:
            return self._built[name]
        image = self._root / name
        variables: dict[str, str] = {}
        folder = image
        for line in stages()[name]:
            instruction, _, rest = line.partition(" ")
            words = rest.split()
            if instruction == "FROM" and words[0] in stages():
                variables = dict(self.stage(words[0]))
                folder = image / variables.get("PWD", "")
                shutil.copytree(self._root / words[0], image, symlinks=True)
            elif instruction == "FROM":
                image.mkdir()
            elif instruction == "ENV":
                variables |= dict(word.split("=", 1) for word in shlex.split(rest))
            elif instruction == "ARG" and "=" in rest:
                variables.setdefault(*rest.split("=", 1))
            elif instruction == "WORKDIR":
                variables["PWD"] = rest.strip("/")
                folder = image / variables["PWD"]
                folder.mkdir(parents=True, exist_ok=True)
            elif instruction == "COPY":
                self._copy(image, [word for word in words if not word.startswith("--chown")])
            elif instruction == "RUN":
                self.output += self._run(rest, image, folder, variables)
        self._built[name] = variables
        return variables

    def environment(self, stage: str) -> dict[str, str]:
        """Of a process in this stage."""
        return self._environment(self._root / stage, self.stage(stage))

    def _environment(self, image: Path, variables: dict[str, str]) -> dict[str, str]:
        path = f"{self._commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        moved = {name: _moved(text, image) for name, text in variables.items() if name != "PWD"}
        return {**moved, "PATH": path}

    def _copy(self, image: Path, words: list[str]) -> None:
        source = ROOT
        if words[0].startswith("--from="):
            name = words.pop(0).removeprefix("--from=")
            self.stage(name)
            source = self._root / name
        *patterns, target = words
        into = Path(_moved(target, image))
        found = [path for pattern in patterns for path in source.glob(pattern.lstrip("/"))]
        assert found, words
        for path in found:
            if path.is_dir():
                shutil.copytree(path, into, symlinks=True, dirs_exist_ok=True)
            else:
                (into if target.endswith("/") else into.parent).mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, into)

    def _run(self, command: str, image: Path, folder: Path, variables: dict[str, str]) -> str:
        shell = ["/bin/sh", "-e", "-c", _moved(command, image)]
        printed = run(shell, timeout_s=400, cwd=folder, variables=self._environment(image, variables))
        for pip in image.glob("opt/*/bin/pip"):
            _put_in_place_of_pip(pip)  # a real one, which the command has just put there
        return printed


def _moved(text: str, image: Path) -> str:
    return re.sub(r"(?<![\w./:])/(?=(opt|src|dist|wheels|var|usr|workspace|tmp)\b)", f"{image}/", text)


def _put_in_place_of_pip(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.write_text(PIP)
    path.chmod(0o755)


# ---- without an engine --------------------------------------------------------------------------------------------


def test_no_torch_comes_into_the_server_image() -> None:
    assert not [line for line in lineage("server") if "torch" in line.lower()]
    assert any("torch" in line.lower() for line in lineage("worker"))
    assert not [dependency for dependency in PROJECT["project"]["dependencies"] if "torch" in dependency]


@pytest.mark.parametrize("target", ["server", "worker"])
def test_an_image_runs_as_a_number_that_is_not_root(target: str) -> None:
    users = [line.split()[1] for line in stages()[target] if line.startswith("USER ")]
    assert users
    uid, _, gid = users[-1].partition(":")
    assert int(uid) > 0
    assert int(gid) > 0


def test_the_context_holds_what_the_images_copy() -> None:
    copied = {
        source.replace("[s]", "s")
        for lines in stages().values()
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert copied == set(ALLOWED_IN_CONTEXT)
    packages = {path.split("/")[0] for path in PROJECT["tool"]["setuptools"]["package-dir"].values()}
    assert packages <= copied


def test_images_take_packages_by_hash_only() -> None:
    """All that pip installs from an index, but another torch than that of the index of CPU builds."""
    commands = [
        command.strip()
        for line in lineage("worker")
        if line.startswith("RUN ")
        for command in re.split(r"&&|;", line.removeprefix("RUN "))
        if re.search(r"bin/pip .*\b(install|wheel)\b", command)
    ]
    assert len(commands) > 5
    chosen = [command for command in commands if command.split()[-1] in ("torch", '"$TORCH_SPEC"')]
    assert len(chosen) == 2
    assert chosen[0].startswith("else ")
    assert sum(command.startswith("then ") and "-r requirements-torch.txt" in command for command in commands) == 1
    for command in commands:
        is_local = "--no-index" in command or "--no-deps --no-build-isolation" in command
        assert is_local or command in chosen or "--require-hashes -r requirements-" in command, command


def test_torch_s_hashes_are_those_of_its_index() -> None:
    """As the index links its wheels: of other versions, systems and builds, too."""
    wheels = {
        "torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl": "b" * 64,
        "torch-2.13.0%2Bcpu-cp312-cp312-manylinux_2_28_aarch64.whl": "a" * 64,
        "torch-2.13.0%2Bcpu-cp311-cp311-win_amd64.whl": "c" * 64,
        "torch-2.13.1%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl": "d" * 64,
        "torch-2.13.0%2Bcu130-cp311-cp311-manylinux_2_28_x86_64.whl": "e" * 64,
    }
    page = "".join(
        f'<a href="https://here/whl/cpu/{name}#sha256={digest}">{name}</a>\n' for name, digest in wheels.items()
    )
    lock = runpy.run_path(str(DEPLOY / "requirements.py"))["torch_lock"]
    found = lock(page, "2.13.0")
    assert found.replace("\\\n", "").split() == [
        "torch==2.13.0+cpu", f"--hash=sha256:{'a' * 64}", f"--hash=sha256:{'b' * 64}"
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"no wheel of torch 2\.14\.0\+cpu"):
        lock(page, "2.14.0")
    locked = (DEPLOY / "requirements-torch.txt").read_text().replace("\\\n", "").split()
    constraint = next(
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
    )
    assert locked[0] == f"{constraint}+cpu"
    assert (
        len({each for each in locked[1:] if re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each)}) == len(locked) - 1 > 0
    )


@pytest.mark.parametrize("image", ["server", "worker", "build"])
def test_the_locked_packages_are_those_that_pyproject_asks_for(image: str) -> None:
    text = (DEPLOY / f"requirements-{image}.txt").read_text().replace("\\\n", "")
    locked: dict[str, str] = {}
    for line in (line for line in text.splitlines() if line and not line.startswith("#")):
        match = re.fullmatch(r"([\w.-]+)==([\w.]+)((?:\s+--hash=sha256:[0-9a-f]{64})+)", line)
        assert match, f"no version and hash: {line[:60]}"
        locked[match[1]] = match[2]
    asked = run([sys.executable, str(DEPLOY / "requirements.py"), image], timeout_s=60).split()
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(locked[requirement.name]), requirement
    assert "torch" not in locked
    if image == "worker" and torch.__version__.endswith("+cpu"):
        needs = [Requirement(text) for text in importlib.metadata.requires("torch") or ()]
        assert not [each for each in needs if each.marker is None and each.name not in locked]
    server = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (DEPLOY / "requirements-server.txt").read_text(), re.MULTILINE))
    assert image == "build" or server.items() <= locked.items()


@pytest.mark.long
@pytest.mark.timeout(500)  # every kernel is compiled: a minute of two free cores
def test_every_command_of_the_dockerfile_runs(tmp_path: Path) -> None:
    """Its RUN lines as they stand, in the folders that its COPY lines fill; only packages are not installed."""
    build = DryBuild(tmp_path)
    for target in ("server", "worker"):
        build.stage(target)
        assert (tmp_path / target / "usr/local/share/byteps/healthy.py").exists()
        loads = run([sys.executable, "-c", FROM_CACHE], timeout_s=100, variables=build.environment(target))
        assert loads.strip() == "True", target
        asked_for = [line for line in build.output.splitlines() if line.startswith("pip ")]
        assert any("torch" in line for line in asked_for) == (target == "worker"), build.output
    assert any("--require-hashes -r requirements-server.txt" in line for line in asked_for)


def test_kernels_that_cant_be_kept_end_a_build(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that compiles them, where nothing can be written."""
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    monkeypatch.setattr(compile_kernels, "prepare_all", lambda: [numba_kernels.build(Op.SUM, DType.INT16)])
    assert compile_kernels.main() == 1
    assert "NUMBA_CACHE_DIR" in capsys.readouterr().err


def test_docker_compose_understands_the_compose_file() -> None:
    command = compose_command()
    if command is None:
        pytest.skip("no Compose: neither `docker compose` nor `docker-compose` is there")
    services = run([*command, "-f", str(DEPLOY / "compose.yaml"), "config", "--services"], timeout_s=60)
    assert set(services.split()) == SERVICES


@pytest.mark.slow
def test_health_check() -> None:
    """The images' health check, asked as in a container: beside the scheduler, and in a machine that is not there."""

    def ask(**variables: str) -> tuple[int, str]:
        command = [sys.executable, str(DEPLOY / "healthy.py")]
        done = subprocess.run(command, env=clean | variables, capture_output=True, text=True, timeout=30)
        return done.returncode, done.stdout

    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "BYTEPS_", "PS_"))}
    assert ask()[0] == 0
    port = str(free_port())
    variables = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": port, "DMLC_NUM_WORKER": "2"}
    scheduler = subprocess.Popen([sys.executable, "-m", "byteps_py.scheduler"], env=clean | variables)
    try:
        deadline = time.monotonic() + 60
        while (found := ask(DMLC_ROLE="scheduler", **variables))[0] and time.monotonic() < deadline:
            assert scheduler.poll() is None, found
        assert found[0] == 0, found
        code, words = ask(DMLC_ROLE="server", **variables)
        assert code == 1
        assert "absent" in words
    finally:
        scheduler.terminate()
        scheduler.wait(30)
    code, words = ask(DMLC_ROLE="scheduler", **variables)
    assert code == 1
    assert "no scheduler answers" in words


# ---- with an engine -----------------------------------------------------------------------------------------------


def run(
    command: list[str], *, timeout_s: float, cwd: Path | None = None, variables: dict[str, str] | None = None
) -> str:
    """What ``command`` prints. Fails the test, with the end of it, when the command fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        pytest.fail(f"{' '.join(command)}: not done after {timeout_s:g} s\n{output[-4000:]}")
    if done.returncode:
        pytest.fail(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-4000:]}")
    return done.stdout


def succeeds(command: list[str], timeout_s: float) -> tuple[bool, str]:
    """Whether ``command`` does, and its last line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return done.returncode == 0, (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]


def compose_command() -> list[str] | None:
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and succeeds([*command, "version"], 30)[0]:
            return command
    return None


@dataclass(frozen=True)
class Cluster:
    """The compose file in ``context``, under a project name of its own."""

    command: tuple[str, ...]
    context: Path
    variables: dict[str, str]

    def __call__(self, *arguments: str, timeout_s: float = 120, **variables: str) -> str:
        """Run a Compose command and return what it prints."""
        command = [*self.command, "-f", "deploy/compose.yaml", "-p", self.project, *arguments]
        return run(command, timeout_s=timeout_s, cwd=self.context, variables={**self.variables, **variables})

    @property
    def project(self) -> str:
        return f"byteps-test-{os.getpid()}"

    def health(self) -> str:
        """What the health checks said last, by container."""
        ids = self("ps", "-q", "-a").split()
        template = "{{.Name}} {{with .State.Health}}{{range .Log}}{{.Output}}{{end}}{{end}}"
        return run(["docker", "inspect", "-f", template, *ids], timeout_s=60) if ids else "no container"

    def exit_statuses(self) -> dict[str, int]:
        """By service. Fails the test if a container still runs."""
        ids = self("ps", "-q", "-a").split()
        template = '{{index .Config.Labels "com.docker.compose.service"}} {{.State.Status}} {{.State.ExitCode}}'
        lines = [line.split() for line in run(["docker", "inspect", "-f", template, *ids], timeout_s=60).splitlines()]
        assert {state for _, state, _ in lines} == {"exited"}
        return {service: int(code) for service, _, code in lines}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Both images, built as tag ``test``, and the compose file that uses them. Skips without an engine."""
    is_there, words = succeeds(["docker", "info"], 30)
    if not is_there:
        pytest.skip(f"no Docker engine: {words}")
    command = compose_command()
    if command is None:
        pytest.skip("no Docker engine: it is there, but neither `docker compose` nor `docker-compose` is")
    has_base = any(succeeds(["docker", *how, BASE_IMAGE], 300)[0] for how in (["image", "inspect"], ["pull"]))
    if not has_base:
        pytest.skip(f"no Docker engine with a base image: {BASE_IMAGE} is not there and can't be pulled")
    context = tmp_path_factory.mktemp("context")
    variables = {**fill(context), "BYTEPS_TAG": "test", "BYTEPS_LOG_LEVEL": "INFO"}
    cluster = Cluster(tuple(command), context, variables)
    for line, _ in commands_of(PAGE.blocks_after("build the images")[0]):
        own = " ".join(f"--build-arg {name}={text}" for name, text in variables.items() if name.startswith("PIP_"))
        in_shell(at_own_places(line, {" .\n": f":test {own} .\n"}), context, BUILD_LIMIT_S)
    shutil.rmtree(context / "deploy/wheels", ignore_errors=True)
    yield cluster
    cluster("down", "-v", "--timeout", "5")


def fill(context: Path) -> dict[str, str]:
    """Copies what the images are made of, adds a secret and, if this machine can get them, wheels.

    Inside a build there may be no way to a package index although there is one outside. Returns the variables
    that the build needs.
    """
    for name in ALLOWED_IN_CONTEXT:
        source, target = ROOT / name, context / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir() and source.name != "wheels":
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.is_file():
            shutil.copy2(source, target)
    for path in (ROOT / ".dockerignore", DEPLOY / "Dockerfile", DEPLOY / "compose.yaml"):
        shutil.copy2(path, context / path.relative_to(ROOT))
    make_secret, make_readable, _ = (line for line, _ in commands_of(PAGE.blocks_after("a cluster on one host")[0]))
    in_shell(make_secret + make_readable, context, 30)
    others, torch, build = (line for line, _ in commands_of(PAGE.blocks_after("wheels")[0]))
    torch = at_own_places(torch, {"--index-url https://download.pytorch.org/whl/cpu ": ""})  # this machine's index
    pip = {"pip download": f"{sys.executable} -m pip download --quiet"}
    got = all(
        succeeds(["sh", "-c", f"cd {shlex.quote(str(context))} && {at_own_places(line, pip)}"], 600)[0]
        for line in (others, torch)
    )
    assert build.startswith("PIP_NO_INDEX=1 ")
    return {"PIP_NO_INDEX": "1"} if got else {}


def in_shell(script: str, folder: Path, limit_s: float) -> None:
    with shell(script, folder) as process:
        output, _ = process.communicate(timeout=limit_s)
    assert process.returncode == 0, output


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("target", ["server", "worker"])
def test_an_image(cluster: Cluster, target: str) -> None:
    image = f"byteps-{target}:test"
    alone = ["docker", "run", "--rm", "--read-only", "--network", "none", "--entrypoint"]
    assert int(run([*alone, "id", image, "-u"], timeout_s=60)) > 0
    has_torch = "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
    assert run([*alone, "python", image, "-c", has_torch], timeout_s=60).strip() == str(target == "worker")
    assert run([*alone, "python", image, "-c", FROM_CACHE], timeout_s=60).strip() == "True"


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.timeout(2400)
def test_a_cluster_trains_and_ends(cluster: Cluster) -> None:
    """With two CPU machines and without any: the same weights, bit for bit, and every container ends with 0."""
    digests = []
    for cpu_machines in (2, 0):
        services = sorted(s for s in SERVICES if cpu_machines or not s.startswith("server"))
        try:
            [*_, (line, _)] = commands_of(PAGE.blocks_after("a cluster on one host")[0])
            assert line.split() == ["docker-compose", "-f", "deploy/compose.yaml", "up", "--build"]
            output = cluster("up", "--no-build", *services, timeout_s=300, CPU_MACHINES=str(cpu_machines))
            assert cluster.exit_statuses() == dict.fromkeys(services, 0), output
        finally:
            print(cluster.health())  # shown if the test fails
            cluster("down", "-v", "--timeout", "5")
        accuracy = re.search(r"test accuracy ([\d.]+)%", output)
        assert accuracy, output
        assert float(accuracy[1]) > 90
        weights = re.search(r"weights ([0-9a-f]{16}), the same on every rank", output)
        assert weights, output
        digests.append(weights[1])
    assert digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.timeout(2400)
def test_a_server_in_a_container_that_is_started_by_hand(cluster: Cluster) -> None:
    """Beside a job of this machine, whose network it shares."""
    secret = str(cluster.context / "deploy/secrets/cluster")
    port = str(free_port())
    [(line, _)] = commands_of(PAGE.blocks_after("a container by hand")[0])
    places = {
        "/etc/byteps/secret": secret,
        "10.0.0.1": "127.0.0.1",
        "9000": port,
        " byteps-server\n": " -e BYTEPS_MACHINE_ID=container -e DMLC_NODE_HOST=127.0.0.1 byteps-server:test\n",
    }
    where = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": port, "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1"}
    where |= {"BYTEPS_SECRET": Path(secret).read_text().strip(), "BYTEPS_LOCAL_SIZE": "2"}
    with (
        shell(at_own_places(line, places), cluster.context) as container,
        breaking.launch("", DMLC_ROLE="scheduler", **where),
        breaking.launch("", "short", DMLC_ROLE="worker", DMLC_WORKER_ID="0", **where) as job,
    ):
        assert job.end() == 0, job.text
        output, _ = container.communicate(timeout=60)
        assert container.returncode == 0, output
    assert {"0: reduced", "1: reduced"} <= set(job.said)
