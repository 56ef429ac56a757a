"""The documentation as a site: it is built without a warning, and its links lead somewhere. What is made from the code
is what the code says."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from support.clusters import ROOT

from byteps_py import errors

DOCS = ROOT / "docs"
TIMEOUT_S = 280


def test_generated_files_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(DOCS / "generators"), "--check"], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def documented(page: str) -> list[tuple[str, str]]:
    """(module, name) of each directive of autodoc."""
    found, module = [], ""
    for current, name in re.findall(
        r"^\.\. (?:currentmodule:: (\S+)|auto\w+:: (\S+))$", (DOCS / "reference" / page).read_text(), re.MULTILINE
    ):
        module = current or module
        if name:
            found.append((module, name))
    return found


def public(module: str) -> set[tuple[str, str]]:
    return {(module, name) for name in importlib.import_module(module).__all__}


#: Modules, whose names have sections of their own.
MODULES = {"elastic", "local", "optim", "mpi_ops", "parallel"}
MODULES |= {"tensor", "context", "checkpoint", "fsdp", "mesh", "multimodal", "numerics", "sharding"}


def has_section(module: str, name: str) -> bool:
    """Errors have a page of their own, and a name of both packages stands on the first page."""
    is_of_torch = module == "byteps_py.parallel" and name in importlib.import_module("byteps_py.torch").__all__
    return name in MODULES or name in errors.__all__ or is_of_torch


def test_the_pages_of_the_api_have_every_public_name_once() -> None:
    found = documented("api-torch.md")
    expected = public("byteps_py.torch") | public("byteps_py.torch.elastic") | public("byteps_py.torch.local")
    expected |= {("byteps_py.torch.optim", "LAMB")}
    assert sorted(found) == sorted(name for name in expected if not has_section(*name))
    found = documented("api-parallel.md")
    inner = ("tensor", "context", "checkpoint", "sharding", "multimodal")
    expected = public("byteps_py.parallel").union(*(public(f"byteps_py.parallel.{name}") for name in inner))
    expected |= public("byteps_py.tools.numerics")
    expected |= {("byteps_py.tools.plan.module_trace", name) for name in ("trace_model", "InputSize", "load_factory")}
    expected |= {
        ("byteps_py.tools.plan.model_costs", name)
        for name in ("ModelCosts", "LayerCost", "OperatorCost", "RepeatedBlocks", "AttentionSize", "UncostedOperator")
    }
    of_fsdp = ("cache_parameters", "ParameterCache", "compress_gradients")
    expected |= {("byteps_py.parallel.fsdp", name) for name in of_fsdp}
    assert sorted(found) == sorted(name for name in expected if not has_section(*name))


class Links(HTMLParser):
    """What a page refers to, and the anchors that it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.anchors |= {given["id"]} if given.get("id") else set()
        self.targets |= {target for name in ("href", "src") if (target := given.get(name))}


@pytest.fixture(name="site", scope="module")
def _site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("sphinx") is None or importlib.util.find_spec("furo") is None:
        pytest.skip("Sphinx is not installed: make docs, or pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    words = [
        "--quiet",
        "--fail-on-warning",
        "--keep-going",
        "--conf-dir",
        "docs",
        "--doctree-dir",
        str(folder / "trees"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *words, ".", str(folder / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder / "site"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_its_links_lead_somewhere(site: Path) -> None:
    pages = {path: Links(path) for path in site.rglob("*.html")}
    wrong = []
    for path, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not there.is_file() or (there in pages and anchor and anchor not in pages[there].anchors):
                wrong.append(f"{path.relative_to(site)}: {target}")
    assert sorted(wrong) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_has_every_page_and_every_name(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(ROOT).with_suffix(".html")).exists(), page
    assert (site / "index.html").read_text() == (site / "README.html").read_text()
    for page in ("api-torch.md", "api-parallel.md"):
        anchors = Links(site / "docs" / "reference" / page.replace(".md", ".html")).anchors
        assert [name for module, name in documented(page) if f"{module}.{name}" not in anchors] == []
