"""What an installed wheel holds, every package of the source tree under one name; and which torch `make` installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("byteps_py", "server", "worker", "proto")
KEPT = {".py", ".pyi", ".proto", ".json"}


@pytest.mark.slow
def test_a_wheel_has_every_file_of_the_packages(tmp_path: Path) -> None:
    """Modules, and what they read: schemas, tables, types."""
    tree = tmp_path / "tree"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "build" / "types" / "byteps_py" / "old").mkdir(parents=True)  # as `make check` leaves it
    (tree / "build" / "types" / "byteps_py" / "old" / "__init__.py").touch()
    pip = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--quiet", "-w", tmp_path]
    done = subprocess.run(pip, cwd=tree, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
    kept = [path.relative_to(ROOT) for name in FOLDERS for path in (ROOT / name).rglob("*") if path.suffix in KEPT]
    expected = {str(path if path.parts[0] == "byteps_py" else "byteps_py" / path) for path in kept}
    assert held == expected | {"byteps_py/py.typed"}


# ---- make torch ---------------------------------------------------------------------------------------------------

(TORCH,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


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
        (["there", TORCH + "+cpu"], [], TORCH + "+cpu"),
        (["there"], [], None),  # not PyPI's, which is gigabytes
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
