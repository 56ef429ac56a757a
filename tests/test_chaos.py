"""A short run of chaos; ``make chaos`` makes a long one."""

from __future__ import annotations

import pytest
from chaos.run import run

STRETCHES = 8


@pytest.mark.timeout(300)
def test_random_faults_change_nothing() -> None:
    wild = run(STRETCHES, seed=7)
    assert wild.counts
    assert wild.digests == run(STRETCHES, None).digests
