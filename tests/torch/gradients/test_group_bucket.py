"""Gradients whose sums a machine's GPUs make a part of: the bits of the contract's order, whichever gradients ranks
compute first."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.clusters import ROOT, bpslaunch
from support.stand_in_device import StandInDevice, StandInTensor
from support.stand_in_ranks import DeviceCluster, OnStreams
from support.threaded import ThreadedCluster, contract
from torch._C._distributed_c10d import Store

import byteps_py as bps
from byteps_py.errors import UnsupportedError
from byteps_py.topology.local_plan import LocalStrategy
from byteps_py.topology.local_sums import LocalSumPlan
from byteps_py.torch.collectives.all_reduce.local_groups import LocalGroupAllReduce, connect
from byteps_py.torch.collectives.completion import Completer
from byteps_py.torch.collectives.context import current
from byteps_py.torch.collectives.group_collectives import GroupCollectives, Reduction
from byteps_py.torch.collectives.group_work import CallLog, GroupContext
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.work import Call
from byteps_py.torch.gradients.bucket import GradientOptions
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.group_bucket import GroupBucket, GroupSums
from byteps_py.torch.operations.reductions import Average, ReduceOp, Sum

PLAN = LocalSumPlan(LocalStrategy.ONE_SWITCH, "", ((0, 1, 2),))
#: Of parameters, in the order of the forward pass: with buckets of 400 KB, several buckets.
COUNTS = (70_000, 1_000, 90_000, 3, 120_000, 66_000)
STEPS = 2


def gradient(rank: int, step: int, place: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 10 * step + 100 * place)
    return torch.randn(COUNTS[place], generator=generator)


class Trained(StandInTensor):
    """A parameter. The stand-in's tensors require no gradients."""

    requires_grad = property(lambda self: True)  # type: ignore[assignment]


def parameter(device: StandInDevice, count: int) -> torch.nn.Parameter:
    made = torch.nn.Parameter(device.tensor(torch.zeros(count)))
    made.__class__ = Trained
    return made


class Group:
    """The process group of all ranks, whose GPUs are stand-ins."""

    def __init__(self, size: int, rank: int, store: Store, device: StandInDevice) -> None:
        context = current()
        members = Members(context, context.session, tuple(range(size)), rank, "group")
        group_context = GroupContext(members.session, 20.0, CallLog(members, store), 5.0)

        def connected(store: Store, place: int, size: int, _: torch.device) -> Any:
            return OnStreams(connect(store, place, size, torch.device("cpu")), device)

        self.local = LocalGroupAllReduce(members, group_context, store, PLAN, connected)
        self.collectives = GroupCollectives(members, group_context, Completer(), None, None, self.local)
        self.kinds: list[str] = []

    def begin(self, flat: torch.Tensor, is_average: bool) -> Any:
        work = self.collectives.reduce(Call("all_reduce", [flat], 20.0), [flat], Reduction(average=is_average))
        self.kinds.append(type(work).__name__)
        return work

    def close(self) -> None:
        self.collectives.finish()
        self.local.close()


def run(op: ReduceOp, by_group: bool, machines: int = 2) -> tuple[list[list[list[torch.Tensor]]], DeviceCluster]:
    """The gradients of all parameters after each step, on each rank, each of which computes them in its own order."""
    cluster = DeviceCluster((3,) * machines, fusion_bytes=400_000)
    store = dist.HashStore()

    def main(rank: int, device: StandInDevice) -> list[list[torch.Tensor]]:
        group = Group(cluster.size, rank, store, device)
        found = []
        with device.using(device.new_stream(device.device)):
            params = [parameter(device, count) for count in COUNTS]
            named = [(f"p{place}", param) for place, param in enumerate(params)]
            sums = GroupSums(group.begin) if by_group else None
            reducer = GradientReducer(current(), named, GradientOptions(op=op), group_sums=sums)
            assert len(reducer.buckets) > 2
            assert all(isinstance(bucket, GroupBucket) is by_group for bucket in reducer.buckets)
            for step in range(STEPS):
                order = list(range(len(params) - 1))  # the last one has no gradient: zeros
                random.Random(rank).shuffle(order)
                for param in params:
                    param.grad = None
                for place in order:
                    params[place].grad = device.tensor(gradient(rank, step, place))
                    reducer.ready(reducer.place(params[place]), params[place])
                reducer.finish()
                found.append([param.grad.cpu() for param in params if param.grad is not None])
        assert ("LocalSumWork" in group.kinds) is by_group, group.kinds
        group.close()
        return found

    return cluster.on_devices(main), cluster


@pytest.mark.parametrize("op", [Sum, Average])
def test_gradients_have_the_bits_of_sums_by_the_services(op: ReduceOp) -> None:
    found, cluster = run(op, by_group=True)
    assert not cluster.races, "\n".join(cluster.races)
    expected, _ = run(op, by_group=False)
    for step in range(STEPS):
        for place in range(len(COUNTS)):
            assert all(torch.equal(rank[step][place], expected[0][step][place]) for rank in found)
            if place < len(COUNTS) - 1:
                parts = [gradient(rank, step, place) for rank in range(cluster.size)]
                want = contract(parts, (3, 3), average=op is Average)
                assert torch.equal(found[0][step][place], want)
    assert not any(tensor.any() for tensor in (found[0][step][-1] for step in range(STEPS)))


class Done:
    def wait(self) -> None: ...


def reducer_of(begun: list[int], params: list[torch.nn.Parameter]) -> GradientReducer:
    """``begun``: the sizes of sums, in the order in which they begin."""

    def begin(flat: torch.Tensor, is_average: bool) -> Done:
        begun.append(flat.numel())
        return Done()

    named = [(f"p{place}", param) for place, param in enumerate(params)]
    return GradientReducer(current(), named, group_sums=GroupSums(begin, "cpu"))


def test_buckets_take_turns() -> None:
    def main(rank: int) -> None:
        begun: list[int] = []
        params = [torch.nn.Parameter(torch.zeros(count)) for count in (100, 200, 300, 400)]
        reducer = reducer_of(begun, params)
        assert [bucket.request.spec.count for bucket in reducer.buckets] == [400, 300, 200, 100]
        for _ in range(2):
            begun.clear()
            for place, expected in ((1, []), (3, [400]), (0, [400]), (2, [400, 300, 200, 100])):
                params[place].grad = torch.ones_like(params[place])
                reducer.ready(reducer.place(params[place]), params[place])
                assert begun == expected
            reducer.finish()
        params[2].requires_grad_(False)  # frozen on all ranks: it takes no part
        params[3].grad = None
        begun.clear()
        for param in (params[0], params[1]):
            reducer.ready(reducer.place(param), param)
        assert begun == []
        reducer.finish()
        assert begun == [400, 200, 100]

    ThreadedCluster((2,), fusion_bytes=400).run(main)


def test_buckets_are_finished_one_by_one() -> None:
    """As CrossBarrier does."""

    def main(rank: int) -> None:
        begun: list[int] = []
        params = [torch.nn.Parameter(torch.zeros(count)) for count in (100, 200)]
        reducer = reducer_of(begun, params)
        for step in range(3):
            for param in params:
                param.grad = torch.full_like(param, float(step))
                reducer.ready(reducer.place(param), param)
            for bucket in reducer.hand_over_all():
                assert reducer.finish_bucket(bucket)
            assert all(
                torch.equal(param.grad, torch.full_like(param, step)) for param in params if param.grad is not None
            )
        assert begun == [200, 100] * 3

    ThreadedCluster((2,), fusion_bytes=400).run(main)


def test_a_round_that_is_broken_off_does_not_hold_up_the_next_one() -> None:
    def main(rank: int) -> None:
        begun: list[int] = []
        params = [torch.nn.Parameter(torch.zeros(count, 1)) for count in (100, 200)]
        reducer = reducer_of(begun, params)
        params[1].grad = torch.ones_like(params[1]).to_sparse()
        params[0].grad = torch.ones_like(params[0])
        with pytest.raises(UnsupportedError, match=r"gradient of 'p1' is sparse.*or pass sparse_as_dense=True to Dist"):
            reducer.finish()
        params[1].grad = torch.ones_like(params[1])
        begun.clear()
        reducer.finish()
        assert begun == [200, 100]

    ThreadedCluster((2,), fusion_bytes=400).run(main)


def test_without_a_process_group_the_services_sum_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def main(rank: int) -> torch.Tensor:
        param = torch.nn.Parameter(torch.zeros(3))
        optimizer = bps.DistributedOptimizer(torch.optim.SGD([param], 1.0), [("p", param)])
        (param * float(rank + 1)).sum().backward()
        optimizer.step()
        return param.detach()

    found = ThreadedCluster((2,), local_sum="exact").run(main)
    assert all(torch.equal(each, torch.full((3,), -1.5)) for each in found)
    text = "BYTEPS_LOCAL_SUM=exact: gradients are summed by host-sum: GPUs sum by a process group: call torch"
    assert text in caplog.text


@pytest.mark.slow
def test_a_process_group_of_its_own() -> None:
    """In real processes, with tensors in the host's memory."""
    run = bpslaunch(["-np", "2"], [ROOT / "tests" / "programs" / "group_sums.py"], timeout_s=60)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("gradients are right") == 2
