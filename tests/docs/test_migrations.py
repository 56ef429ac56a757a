"""The left columns of the pages for users of Horovod and BytePS: their programs run with this package under the names
of those, and nothing else changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.breaking import command
from support.clusters import ROOT
from support.documents import Page

RENAMED = """
import importlib.abc, importlib.util, sys

class Renamed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        ours = name in ("horovod", "byteps") or name.startswith(("horovod.", "byteps."))
        return importlib.util.spec_from_loader(name, self, is_package=True) if ours else None

    def create_module(self, spec):
        self._own = spec
        return importlib.import_module("byteps_py" + spec.name.removeprefix("horovod").removeprefix("byteps"))

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Renamed())

import torch

def model_of():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))

model = model_of()
inputs, targets = torch.randn(8, 2), torch.randn(8, 1)
torch.cuda.set_device = lambda device: None  # the only thing here that needs a GPU
"""
#: By page: code before a block, the block's marker, and code after it.
PROGRAMS = {
    "horovod": (
        ("", "Horovod, start", "loss = torch.nn.functional.mse_loss(model(inputs), targets)\n"),
        ("scaler = torch.amp.GradScaler('cpu')\n", "Horovod, clip", "opt.zero_grad()\n"),
        (
            "def train_one_batch(state):\n"
            "    torch.nn.functional.mse_loss(model(inputs), targets).backward()\n"
            "    opt.step()\n"
            "    opt.zero_grad()\n",
            "Horovod, elastic",
            "train(state)\nassert state.batch == 100\nhvd.shutdown()\n",
        ),
    ),
    "byteps": (
        ("", "BytePS, start", "torch.nn.functional.mse_loss(model(inputs), targets).backward()\nopt.step()\n"),
        ("loss = torch.tensor(float(bps.rank()))\n", "BytePS, tensors", "assert loss == 0.5\n"),
        (
            "local = bps.local_rank()\nmodel = model_of()\n",
            "BytePS, DDP",
            "torch.nn.functional.mse_loss(model(inputs), targets).backward()\nbps.shutdown()\n",
        ),
        (
            "import byteps.torch.cross_barrier as bps\nbps.init()\nmodel = model_of()\n"
            "opt = torch.optim.SGD(model.parameters(), lr=0.01)\n",
            "BytePS, CrossBarrier",
            "torch.nn.functional.mse_loss(model(inputs), targets).backward()\nopt.step()\nbps.shutdown()\n",
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("system", PROGRAMS)
def test_the_other_systems_program_runs_here(system: str, tmp_path: Path) -> None:
    page = Page(ROOT / "docs" / "howto" / f"migrate-{system}.md")
    code = RENAMED
    for before, marker, after in PROGRAMS[system]:
        (block,) = page.blocks_after(marker)
        code += f"{before}{block}{after}"
    script = tmp_path / "theirs.py"
    script.write_text(code + "print('all right', flush=True)\n")
    with command(sys.executable, "-m", "byteps_py.launch", "-np", "2", sys.executable, str(script)) as job:
        assert job.end() == 0, job.text
    assert job.text.count("all right") == 2
