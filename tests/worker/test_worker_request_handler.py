"""What ranks hand over, as their communication service counts it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.worker_core import slot, spec, tensor

from byteps_py import kernels
from byteps_py.proto import control_pb2 as pb
from byteps_py.wire import rank_link as protocol
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.pace import RankPace
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.tensor import RankSlot, SlotState, TensorState
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.ranks.request_handler import RequestHandler


def kept() -> RankSlot:
    """Its declaration was rejected."""
    void = slot(0, spec(name="void"))
    void.move_to(SlotState.VOID)
    return void


def retired() -> RankSlot:
    void = slot(0, spec(name="void"))
    tensor([void]).move_to(TensorState.RETIRED)
    return void


@pytest.mark.parametrize("make", [kept, retired])
def test_a_rank_does_not_wait_for_what_it_handed_over_before_it_heard_that_it_is_void(
    make: Callable[[], RankSlot],
) -> None:
    """It would look as if it had always something to wait for, and so as if it never waited."""
    now_s = 5.0
    void, good = make(), slot(0)
    tensor([good]).machines = 1
    pace, pipeline = RankPace(0), RoundPipeline(1, PushQueue())
    nothing: Any = None
    executor: Any = SimpleNamespace(
        ranks={0: SimpleNamespace(pid=7)}, pace=pace, time=lambda: now_s, kernels=kernels, run=list
    )
    memory: Any = SimpleNamespace(slots={each.id: each for each in (void, good)})
    agreement: Any = SimpleNamespace(handle=lambda event: [])
    machine = pb.Member(machine_index=0, machine_id="m0", local_size=1)
    topology = Topology(1, 0, (machine,), (), 4096, 1)
    heard = RequestHandler(topology, memory, agreement, pipeline, nothing, executor, nothing)
    heard.ready(protocol.Ready(((void.id, 1, void.spec.nbytes),)))
    for step in range(1, 10):
        now_s = 10.0 * step
        heard.ready(protocol.Ready(((good.id, step, good.spec.nbytes),)))
        good.ready_bytes = -1  # delivered
        pace.done(0, good.id, now_s + 1)
    (said,) = pace.report([0])
    assert (said.step_s, said.wait_s) == (pytest.approx(9), pytest.approx(1))
