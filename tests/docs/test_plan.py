"""docs/howto/plan.md: its Python."""

from __future__ import annotations

import pytest
from support.clusters import ROOT
from support.documents import Page


def test_the_costs_of_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = Page(ROOT / "docs" / "howto" / "plan.md").blocks_after("costs of a module")
    exec(block, {})
    printed, stages = capsys.readouterr().out.splitlines()
    layers = 4 * (512 * 512 + 512) + 4 * 512 + 2 * 512 * 2048 + 2048 + 512
    assert printed.startswith(f"{6 * layers} ")
    assert stages == "[range(0, 2), range(2, 4), range(4, 6)]"
