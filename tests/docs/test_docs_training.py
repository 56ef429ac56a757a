"""docs/howto/training.md: its blocks run, one after the other, and what it says of arguments is all there is."""

from __future__ import annotations

import inspect
import re

import torch
from support.clusters import ROOT
from support.threaded import ThreadedCluster

import byteps_py.torch as hvd

TEXT = (ROOT / "docs" / "howto" / "training.md").read_text()


def test_its_blocks_run(tmp_path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 6

    def main(rank: int) -> None:
        names = {"torch": torch, "folder": tmp_path}
        for block in blocks:
            exec(block, names)
        assert names["state"].batch == 3

    for size in (1, 2):
        ThreadedCluster((size,)).run(main)
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.json", "timeline.json.rank1"}


def test_every_argument_of_the_optimizer_is_there() -> None:
    told = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE))))
    arguments = set(inspect.signature(hvd.DistributedOptimizer).parameters)
    assert arguments - {"optimizer", "named_parameters"} <= told
