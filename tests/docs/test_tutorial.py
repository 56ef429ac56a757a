"""The tutorial, followed word for word."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest
from support.clusters import ROOT
from support.documents import Page, commands_of, shell, with_the_pages_port

PAGE = Page(ROOT / "docs" / "tutorial" / "tutorial.md")
TIMEOUT_S = 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PAGE.blocks_after("file train.py")[0])
    return tmp_path


def follow(marker: str, folder: Path) -> None:
    """Run the commands of a block; each prints what the page says."""
    for command, expected in commands_of(PAGE.blocks_after(marker)[0]):
        with shell(command, folder) as process:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, with_the_pages_port(output)) == (0, expected), command


@pytest.mark.slow  # in `make test`: the README's commands, in test_readme.py
def test_alone_and_on_one_machine(folder: Path) -> None:
    follow("one machine", folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cpu_machine_leaves_and_the_weights_are_the_same(folder: Path) -> None:
    follow("cluster", folder)
    runtime = {"XDG_RUNTIME_DIR": str(folder)}  # jobs of other tests are not found
    [(command, expected)] = commands_of(PAGE.blocks_after("leaving")[0])
    with shell(command, folder, **runtime) as job:
        assert job.stdout is not None
        first = job.stdout.readline() + job.stdout.readline()  # where it is, and that it trains
        for other, _ in commands_of(PAGE.blocks_after("second shell")[0]):
            with shell(other, folder, **runtime) as process:
                said, _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, said
        output = with_the_pages_port(first + job.communicate(timeout=TIMEOUT_S)[0])
        told = [line for line in output.splitlines(keepends=True) if "leaves: bps scale" in line]
        assert len(told) == 2, output  # one of each GPU machine
        assert (job.returncode, "".join(line for line in output.splitlines(keepends=True) if line not in told)) == (
            0,
            expected,
        )
    follow("comparing", folder)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_newcomer_follows_it_in_a_clean_clone(tmp_path: Path) -> None:
    """With no more than the page says: the package and what it needs come from pip's package indexes."""
    tree = tmp_path / "byteps_py"
    left_out = shutil.ignore_patterns(".venv*", ".git", "build", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, tree, ignore=left_out, symlinks=True)
    (tree / "train.py").write_text(PAGE.blocks_after("file train.py")[0])
    install = [command.strip() for command, _ in commands_of(PAGE.blocks_after("install")[0])]
    [(first, expected)] = commands_of(PAGE.blocks_after("cluster")[0])
    assert len([*install, first]) <= 5
    script = "\n".join([*install, first])
    began_s = time.monotonic()
    with shell(script, tree) as process:
        output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output
    print(f"from the clone to the losses of two machines: {time.monotonic() - began_s:.0f} s")
    assert with_the_pages_port(output).endswith(expected)
    for command, shown in commands_of(PAGE.blocks_after("one machine")[0]):
        with shell(f". venv/bin/activate\n{command}", tree) as process:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, with_the_pages_port(output)) == (0, shown), command


def test_the_source_tree_is_a_whole_package_without_an_installation() -> None:
    """A program in this folder imports its byteps_py, also where another one is installed."""
    modules = "byteps_py.server, byteps_py.worker, byteps_py.proto.control_pb2, byteps_py.launch"
    packages = sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("-packages"))
    program = f"import sys; sys.path += {list(packages)}; import {modules}; print(byteps_py.server.__file__)"
    # -S: editable installations are not found
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert (done.stdout, done.stderr) == (f"{ROOT / 'server' / '__init__.py'}\n", "")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_with_a_real_installation_inside_the_source_tree(tmp_path: Path) -> None:
    tree, environment = tmp_path / "tree", tmp_path / "venv"
    for name in ("byteps_py", "server", "worker", "proto"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "train.py").write_text(PAGE.blocks_after("file train.py")[0])
    venv.create(environment, symlinks=True)
    [site] = environment.glob("lib/python3*/site-packages")
    # What the package needs is that of this environment: .pth files of a folder added in this way are not read, so an
    # editable installation is not found.
    packages = dict.fromkeys(path for path in sys.path if path.endswith("-packages"))
    (site / "dependencies.pth").write_text("\n".join(packages))
    pip = [environment / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "."]
    done = subprocess.run(pip, cwd=tree, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert (site / "byteps_py" / "proto").is_dir()
    for command, expected in commands_of(PAGE.blocks_after("one machine")[0]):
        with shell(f"PATH={environment / 'bin'}:$PATH {command}", tree) as process:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, with_the_pages_port(output)) == (0, expected), command
    with shell(f"PATH={environment / 'bin'}:$PATH bps status", tree) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in output
