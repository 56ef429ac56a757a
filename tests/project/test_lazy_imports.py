"""Packages that state their public names once: each name is there, and comes with its module only."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [
    ".".join(path.parent.relative_to(ROOT).parts)
    for path in sorted((ROOT / "byteps_py").rglob("__init__.py"))
    if "import_lazily(__name__)" in path.read_text()
]

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from byteps_py.parallel import context, sharding
from byteps_py.tools import numerics
print(context.balance(context.DocumentMask.causal(8), 2), sharding.assign_owners([1, 2], 2), numerics.compare.__name__)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.distributed.optim uses torch.jit
@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_there(package: str) -> None:
    module = importlib.import_module(package)
    names = module.__all__
    assert names == sorted(set(names)) != []
    assert set(names) <= set(dir(module))
    for name in names:
        value = getattr(module, name)
        assert getattr(value, "__name__", name).rpartition(".")[2] == name
    with pytest.raises(AttributeError, match=f"'{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_what_needs_no_torch_imports_none() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "ContextBalance(head_tail=(18, 18), contiguous=(10, 26)) [0, 0] compare\n", done.stderr


def test_numerics_belongs_to_parallel_training() -> None:
    import byteps_py as bps

    home = importlib.import_module("byteps_py.tools.numerics")
    assert importlib.import_module("byteps_py.parallel.numerics") is home
    assert bps.parallel.numerics is home
    records = importlib.import_module("byteps_py.parallel.numerics.records")
    assert records.RankLayout is home.RankLayout
