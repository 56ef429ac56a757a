"""Horovod's interface with real services, on one machine and on two; and the same checks on threads."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import horovod
from support.clusters import bpslaunch
from support.threaded import ThreadedCluster

import byteps_py.torch as hvd
from byteps_py.config.settings import Settings
from byteps_py.session.solo import SoloSession
from byteps_py.torch.collectives.context import Context, use

PROGRAM = Path(__file__).parents[2] / "programs" / "horovod.py"


def test_alone() -> None:
    with use(Context(lambda settings: SoloSession())):
        hvd.init(settings=Settings())
        for names in (True, False):
            horovod.among([0], hvd.global_process_set, names)
        horovod.duplicates()
        assert hvd.join() == 0
        horovod.among([0], hvd.global_process_set, names=True)
        hvd.shutdown()


@pytest.mark.parametrize("machines", [(2,), (3,), pytest.param((4,), marks=pytest.mark.slow), (2, 2)], ids=str)
def test_on_threads(machines) -> None:
    ThreadedCluster(machines).run(lambda rank: horovod.everything())


@pytest.mark.parametrize(
    ("machines", "ranks"),
    [
        *(pytest.param(1, ranks, marks=pytest.mark.slow) for ranks in (2, 4)),
        (2, 1),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(300)
def test_with_services(machines: int, ranks: int) -> None:
    run = bpslaunch(["-np", str(ranks), "--machines", str(machines)], [PROGRAM])
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("all is well") == machines * ranks
