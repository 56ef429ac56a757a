"""What a wheel and a source distribution hold, every package of the source tree under one name; which releases of
requirements they ask for; and which torch `make` installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from byteps_py import __version__

ROOT = Path(__file__).parents[2]
FOLDERS = ("byteps_py", "server", "worker", "proto")
KEPT = {".py", ".pyi", ".proto", ".json"}
(TORCH,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


BESIDE = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in")
BUILD = "import sys, setuptools.build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


@pytest.mark.slow
def test_distributions_have_every_file_of_the_packages_and_no_other(tmp_path: Path) -> None:
    """Modules, and what they read: schemas, tables, types."""
    tree = tmp_path / "tree"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BESIDE:
        shutil.copy(ROOT / name, tree)
    (tree / "build" / "types" / "byteps_py" / "old").mkdir(parents=True)  # as `make check` leaves it
    (tree / "build" / "types" / "byteps_py" / "old" / "__init__.py").touch()
    for stray in ("tests/test_stray.py", "docs/page.md", "deploy/secret", "benchmarks/stray.py"):
        (tree / stray).parent.mkdir()
        (tree / stray).touch()
    for hook in ("build_wheel", "build_sdist"):
        build = [sys.executable, "-W", "ignore", "-c", BUILD, hook, str(tmp_path)]
        done = subprocess.run(build, cwd=tree, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
    kept = [path.relative_to(ROOT) for name in FOLDERS for path in (ROOT / name).rglob("*") if path.suffix in KEPT]
    kept.append(Path("byteps_py/py.typed"))
    [wheel] = tmp_path.glob(f"byteps_py-{__version__}-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [top_level] = [name for name in names if name.endswith(".dist-info/top_level.txt")]
        assert archive.read(top_level) == b"byteps_py\n"
    held = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert held == {str(path if path.parts[0] == "byteps_py" else "byteps_py" / path) for path in kept}
    [sdist] = tmp_path.glob(f"byteps_py-{__version__}.tar.gz")
    with tarfile.open(sdist) as packed:
        held = {member.name.partition("/")[2] for member in packed if member.isfile()}
    about = {name for name in held if name.startswith("byteps_py.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert held - about == {*map(str, kept), *BESIDE}


def test_every_requirement_has_a_first_and_a_last_release() -> None:
    """And a torch of the range is the one that `make` installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *extras["torch"]):
        assert {each.operator for each in Requirement(text).specifier} == {">=", "<"}, text
    [torch] = map(Requirement, extras["torch"])
    assert TORCH in torch.specifier
    for name in ("benchmarks", "examples", "dev"):
        assert str(torch) in {str(Requirement(text)) for text in extras[name]}
    latest = max(int(each.rpartition(".")[2]) for each in project["classifiers"] if "Python :: 3." in each)
    done = subprocess.run(["make", "-pn", "nothing"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    [tested] = re.findall(r"^TORCH_RANGE \S+ (.*)$", done.stdout, re.MULTILINE)
    assert all(version in torch.specifier for version in tested.split()), tested
    assert latest >= sys.version_info.minor


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_what_make_dist_builds_works_in_new_environments(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in (*FOLDERS, "tests/programs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*BESIDE, "Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, tree)
    done = subprocess.run(
        ["make", "dist", f"PYTHON={sys.executable}", f"TORCH_INDEX={os.environ.get('TORCH_INDEX', '')}"],
        cwd=tree, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2, done.stdout  # twine
    for suffix in (".tar.gz", "-py3-none-any.whl"):
        tried = [
            line for line in done.stdout.splitlines() if line.startswith(f"dist/byteps_py-{__version__}{suffix}: ")
        ]
        assert [("torch 2." in line, "no torch: " in line) for line in tried] == [(False, True), (True, False)], tried


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cpu_machine_works_with_the_first_releases_of_all_requirements(tmp_path: Path) -> None:
    """``make lowest-versions`` also has torch, from the index of its CPU builds."""
    tree, environment = tmp_path / "tree", tmp_path / "environment"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BESIDE:
        shutil.copy(ROOT / name, tree)
    python = str(environment / "bin" / "python")
    commands = (
        [sys.executable, "-m", "venv", str(environment)],
        [python, "-m", "pip", "install", "--quiet", "uv"],
        [python, "-m", "uv", "pip", "install", "--quiet", "--resolution", "lowest-direct", str(tree)],
        [python, "-P", str(ROOT / "tests" / "programs" / "try_installation.py"), "lowest"],
    )
    for command in commands:
        clean = {**os.environ, "VIRTUAL_ENV": str(environment)}
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "a summation service has joined a job, and left it" in done.stdout
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        required = Requirement(text)
        [first] = [each.version for each in required.specifier if each.operator == ">="]
        show = "import sys, importlib.metadata as found; print(found.version(sys.argv[1]))"
        done = subprocess.run([python, "-c", show, required.name], capture_output=True, text=True, timeout=60)
        assert done.stdout.startswith(first), text


# ---- make torch ---------------------------------------------------------------------------------------------------


def put_wheel(folder: Path, version: str) -> None:
    """A torch without content, for pip."""
    folder.mkdir(parents=True, exist_ok=True)
    about = f"torch-{version}.dist-info"
    files = {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


def put_index(folder: Path, *versions: str) -> str:
    """A package index with these torches; returns its URL."""
    for version in versions:
        put_wheel(folder / "torch", version)
    (folder / "torch").mkdir(parents=True, exist_ok=True)
    names = [f"torch-{version}-py3-none-any.whl" for version in versions]
    links = "".join(f'<a href="{name.replace("+", "%2B")}">{name}</a>' for name in names)
    (folder / "torch/index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return folder.as_uri()


def installed(environment: Path) -> list[str]:
    found = environment.glob("lib/python3*/site-packages/torch-*.dist-info")
    return [path.name.removeprefix("torch-").removesuffix(".dist-info") for path in found]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: to make it takes longer than everything that is done in it."""
    return tmp_path_factory.mktemp("environment") / "venv"


@pytest.mark.parametrize(
    ("cpu_index", "beside", "expected"),
    [
        pytest.param(["there", TORCH + "+cpu"], [], TORCH + "+cpu", marks=pytest.mark.slow),
        pytest.param(["there"], [], None, marks=pytest.mark.slow),  # not PyPI's, which is gigabytes
        (["silent"], [], None),
        (["silent"], [TORCH + "+cpu"], TORCH + "+cpu"),  # a wheel on this machine
        ([], [], TORCH),
    ],
    ids=["from its index", "not in its index", "no answer", "no answer but a wheel", "as pip is configured"],
)
def test_which_torch_make_installs(
    tmp_path: Path, environment: Path, cpu_index: list[str], beside: list[str], expected: str | None
) -> None:
    for about in environment.glob("lib/python3*/site-packages/torch-*.dist-info"):
        shutil.rmtree(about)
    pypi = put_index(tmp_path / "pypi", TORCH)
    there = put_index(tmp_path / "cpu", *cpu_index[1:])
    url = {"there": there, "silent": "http://127.0.0.1:9"}[cpu_index[0]] if cpu_index else ""
    (tmp_path / "wheels").mkdir()
    for version in beside:
        put_wheel(tmp_path / "wheels", version)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "MAKE", "MFLAGS"))}
    told = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": pypi, "PIP_FIND_LINKS": str(tmp_path / "wheels")}
    done = subprocess.run(
        ["make", "torch", f"VENV={environment}", f"PYTHON={sys.executable}", f"TORCH_INDEX={url}"],
        cwd=ROOT, env=clean | told, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert installed(environment) == ([expected] if expected else []), done.stderr
    assert (done.returncode == 0) == (expected is not None), done.stderr
    if expected is None:
        assert "TORCH_INDEX" in done.stdout
