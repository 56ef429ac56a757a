"""A short run of chaos; ``make chaos`` makes a long one. test_recovery.py has the same faults in its own order."""

from __future__ import annotations

import pytest
from chaos.run import PEACE, calm, run
from test_recovery import OPTIONS, STRETCHES


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("compression", ["", pytest.param("topk", marks=pytest.mark.long)])
def test_random_faults_change_nothing(compression: str) -> None:
    wild = run(STRETCHES, seed=7, options=OPTIONS, compression=compression)
    assert sum(len(wild.longest_s[what]) for what in wild.longest_s.keys() - {PEACE}) == STRETCHES - 2
    assert wild.digests == calm(STRETCHES, OPTIONS, compression=compression).digests
