"""Copies of CUDA tensors on a stand-in for the device. Accesses that nothing orders are races. Each call of the product
that orders something is needed: without it, one of these programs has a race."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import mmap
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch_values
from support.stand_in_device import Site, StandInDevice
from support.stand_in_ranks import DeviceCluster
from support.threaded import ThreadedCluster, ThreadedSession, contract

import byteps_py.torch as bps
from byteps_py.errors import NotInitializedError
from byteps_py.system.shm import PAGE
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.torch.collectives.completion import Completer
from byteps_py.torch.collectives.context import current
from byteps_py.torch.collectives.cuda import CudaCopier
from byteps_py.torch.collectives.group_collectives import GroupCollectives, GroupTransfer, Reduction
from byteps_py.torch.collectives.group_work import CallLog, CombinedWork, GroupContext, ServiceWork
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.message_channels import OwnChannel, ServiceChannel
from byteps_py.torch.collectives.slot_view import CPU, SlotView, TensorRequest
from byteps_py.torch.collectives.work import Call
from byteps_py.torch.gradients.gradient_checksums import GradientChecksums, Scratch
from byteps_py.torch.gradients.hosted.timings import BackwardSteps, _on_this_stream
from byteps_py.wire.chunks import CHUNK_BYTES

MACHINES = (2, 1)
SIZE = sum(MACHINES)
SHAPES = ((), (5, 7), (3000,))
LARGE = (1 << 20) + 3  # elements: several chunks, the last one a small one


@functools.cache
def values(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch_values.values(rank, torch.float32, shape)


def expected(shape: tuple[int, ...], factor: float = 1.0) -> torch.Tensor:
    return contract([values(rank, shape) * factor for rank in range(SIZE)], MACHINES)


def sums(rank: int, device: StandInDevice) -> list[torch.Tensor]:
    """On a stream of the caller's own, which computes what is summed, and uses the sum."""
    found = []
    with device.using(device.new_stream(device.device)):
        for shape in SHAPES:
            for _ in range(3):
                x = device.tensor(values(rank, shape))
                x.mul_(2)
                z = bps.push_pull(x, average=False, name=f"{shape}") + 1
                bps.push_pull_inplace(x, average=False, name=f"in place {shape}")
                x.add_(1)
                found += [z, x, bps.push_pull(x - 1, compression=bps.Compression.fp16, average=False)]
        found.append(bps.broadcast(x, 1))
        return [each.cpu() for each in found]


def check_sums(results: Sequence[Sequence[torch.Tensor]]) -> None:
    at = 0
    for shape in SHAPES:
        total = expected(shape, 2)
        half = contract([total.half()] * SIZE, MACHINES).float()
        for _ in range(3):
            for found in results:
                assert torch.equal(found[at], total + 1)
                assert torch.equal(found[at + 1], total + 1)
                assert torch.equal(found[at + 2], half)
            at += 3


def large_sums(rank: int, device: StandInDevice) -> list[torch.Tensor]:
    """Contributions that leave in chunks."""
    found = []
    for _ in range(2):
        x = device.tensor(values(rank, (LARGE,)))
        x.mul_(2)
        found.append(bps.push_pull(x, average=False, name="large"))
    return [each.cpu() for each in found]


def check_large_sums(results: Sequence[Sequence[torch.Tensor]]) -> None:
    total = expected((LARGE,), 2)
    assert all(torch.equal(each, total) for found in results for each in found)


def places(rank: int, device: StandInDevice) -> list[torch.Tensor]:
    """Slots of groups: results come in chunks, and tensors on the device and on the host take turns."""
    context = current()
    view = SlotView(context.session, context.mover)
    view.declare(TensorSpec("places", DType.FLOAT32, (LARGE,)))
    found = []
    for where in (device.device, device.device, CPU, device.device):
        x = values(rank, (LARGE,))
        x = device.tensor(x) if where.type == "cuda" else x
        outputs = [torch.empty_like(x[:7]), torch.empty_like(x[7:])]
        due = [(0, outputs[0]), (7, outputs[1])]
        view.begin(where, [(0, x)], due=due)
        view.wait(10.0)
        view.fetch_places(where, due)
        view.clear()
        found += outputs
    bytes_view = SlotView(context.session, context.mover)
    bytes_view.declare(TensorSpec("all", DType.FLOAT32, (4,), Op.BROADCAST, root=1))
    output = torch.empty_like(x[:4])
    for _ in range(2):
        bytes_view.begin(device.device, [(0, x[:4])])
        bytes_view.wait(10.0)
        bytes_view.fetch_places(device.device, [(0, output)])
        bytes_view.hand_over()
        bytes_view.wait(10.0)
    return [each.cpu() for each in found]


def check_places(results: Sequence[Sequence[torch.Tensor]]) -> None:
    total = expected((LARGE,))
    for found in results:
        for at in range(0, len(found), 2):
            assert torch.equal(torch.cat(list(found[at : at + 2])), total)


def gathers(rank: int, device: StandInDevice) -> list[torch.Tensor]:
    """Other threads continue these, on the stream of the caller."""
    found = []
    with device.using(device.new_stream(device.device)):
        for turn in range(3):
            x = device.tensor(values(rank, (40 + rank, 7)))
            x.add_(turn)
            handles = [bps.allgather_async(x * (i + 1), name=f"{i}") for i in range(3)]
            with device.using(device.new_stream(device.device)):
                found += [bps.synchronize(handle).cpu() for handle in handles]
            found.append(bps.alltoall(x, [1, 0, 2], name="x")[0])
            found.append(bps.reducescatter(x[:6] * 2, op=bps.Sum, name="x"))
        return [each.cpu() for each in found]


def check_gathers(results: Sequence[Sequence[torch.Tensor]]) -> None:
    for turn in range(3):
        x = [values(rank, (40 + rank, 7)) + turn for rank in range(SIZE)]
        total = contract([each[:6] * 2 for each in x], MACHINES)
        for rank, found in enumerate(results):
            for i in range(3):
                assert torch.equal(found[5 * turn + i], torch.cat([each * (i + 1) for each in x]))
            firsts, counts = (0, 1, 1), (1, 0, 2)
            parts = [each[firsts[rank] : firsts[rank] + counts[rank]] for each in x]
            assert torch.equal(found[5 * turn + 3], torch.cat(parts))
            assert torch.equal(found[5 * turn + 4], total[2 * rank : 2 * rank + 2])


def turns(rank: int, device: StandInDevice) -> list[torch.Tensor]:
    """Tensors of one name, on the device and on the host in turn."""
    found = []
    for where in ("device", "host", "device"):
        x = values(rank, (3000,))
        found.append(bps.push_pull(device.tensor(x) if where == "device" else x, average=False, name="turns"))
    context = current()
    view = SlotView(context.session, context.mover)
    for count in (700, 3000, 3000):  # the slot is declared again, and its memory goes to others
        view.declare(TensorSpec("grows", DType.FLOAT32, (count,)))
        output = torch.empty_like(found[0][:count])
        view.begin(device.device, [(0, device.tensor(values(rank, (count,))))])
        view.wait(10.0)
        view.fetch_places(device.device, [(0, output)])
    found.append(output)
    for _ in range(2):
        found.append(bps.push_pull(device.tensor(values(rank, (3000,))), average=False, name="joined"))
        context.join()
    return [each.cpu() for each in found]


def check_turns(results: Sequence[Sequence[torch.Tensor]]) -> None:
    assert all(torch.equal(each, expected((3000,))) for found in results for each in found)


def gradients(rank: int, device: StandInDevice) -> list[torch.Tensor]:
    """Contributions of buckets, some without a gradient, and a hook of DistributedDataParallel."""
    context, found, streams = current(), [], []
    shapes = ((700,), (600,))
    spec = TensorSpec("bucket", DType.FLOAT32, (1300,))
    (view,) = context.slot_views([TensorRequest(spec, torch.float32, shapes, device.device)])
    for step in range(3):
        with device.using(device.new_stream(device.device)):
            given = [device.tensor(values(rank, shape)) for shape in shapes]
            view.contribute([given[0], None] if step == 1 else given)
            view.wait()
            view.fetch(given)
            streams.append(device.current(device.device))
            found += given
    for stream in streams:
        stream.synchronize()
    return [each.cpu() for each in found]


def check_gradients(results: Sequence[Sequence[torch.Tensor]]) -> None:
    for step in range(3):
        for part, shape in enumerate(((700,), (600,))):
            total = expected(shape)
            want = torch.zeros(shape) if step == 1 and part else total
            assert all(torch.equal(found[2 * step + part], want) for found in results)


def hooks(rank: int, device: StandInDevice) -> list[torch.Tensor]:
    """A bucket of DistributedDataParallel: its callbacks run on other streams."""
    first = torch.nn.Parameter(torch.ones(1))
    found, buffers = [], []
    with device.using(device.new_stream(device.device)):
        for _ in range(2):
            buffer = device.tensor(values(rank, (3000,)))
            buffers.append(buffer)
            bucket: Any = SimpleNamespace(buffer=lambda buffer=buffer: buffer, parameters=lambda: [first])
            future = bps.ddp_comm_hook(None, bucket)
            with device.using(device.new_stream(device.device)):
                found.append((future.wait() * 2).cpu())
    return found


def check_hooks(results: Sequence[Sequence[torch.Tensor]]) -> None:
    mean = contract([values(rank, (3000,)) for rank in range(SIZE)], MACHINES, average=True)
    assert all(torch.equal(each, mean * 2) for found in results for each in found)


class StubGroup:
    """A group without other members' calls."""

    timeout_s, check_interval_s, aborted, progress = 10.0, 10.0, None, None

    def check(self) -> None: ...


def works(rank: int, device: StandInDevice) -> list[torch.Tensor]:
    """Operations of a group: one thread completes them, others use the results."""
    context, found = current(), []
    group: Any = StubGroup()
    view = SlotView(context.session, context.mover)
    view.declare(TensorSpec("work", DType.FLOAT32, (3000,)))
    for turn in range(4):
        stream = device.new_stream(device.device)
        with device.using(device.new_stream(device.device)):
            output = torch.empty_like(device.tensor(values(rank, (3000,))))
            places = [(0, device.tensor(values(rank, (3000,))))]
            call = Call("sum", [output], 10.0, lambda output=output: view.fetch_places(device.device, [(0, output)]))
            view.begin(device.device, places)
            work = ServiceWork(group, None, call, view, device.device)
        if turn % 2:
            (output,) = work.get_future().wait()
            with device.using(stream):
                found.append((output * 2).cpu())
        else:
            with device.using(device.new_stream(device.device)):
                thread = threading.Thread(target=work.complete)
                thread.start()
                thread.join()
            with device.using(stream):
                work.wait()
                found.append((output * 2).cpu())
        output.record_stream(stream)
    return found


def check_works(results: Sequence[Sequence[torch.Tensor]]) -> None:
    assert all(torch.equal(each, expected((3000,)) * 2) for found in results for each in found)


def own_messages(rank: int, device: StandInDevice) -> list[torch.Tensor]:
    """A rank sends to itself: between two stages of a pipeline."""
    members: Any = SimpleNamespace(position=rank, mover=current().mover)
    group: Any = StubGroup()
    channel = OwnChannel(members, group)
    found = []
    sender, receiver, user = (device.new_stream(device.device) for _ in range(3))
    for _ in range(2):
        with device.using(sender):
            x = device.tensor(values(rank, (300,)))
            channel.begin(channel.message(Call("send", [x], 10.0), True))
            x.add_(1)
        with device.using(receiver):
            output = device.tensor(torch.zeros(300))
            work = channel.message(Call("receive", [output], 10.0), False)
            channel.begin(work)
            work.complete()
        with device.using(user):
            work.wait()
            found.append((output * 2).cpu())
            output.record_stream(user)
        del work
    return found


def check_own_messages(results: Sequence[Sequence[torch.Tensor]]) -> None:
    assert all(torch.equal(each, values(rank, (300,)) * 2) for rank, found in enumerate(results) for each in found)


def group_calls(rank: int, device: StandInDevice) -> list[torch.Tensor]:
    """Operations of a process group, all under way at once; each result is used on another stream."""
    context, session = current(), cast(ThreadedSession, current().session)
    members = Members(context, session, tuple(range(SIZE)), rank, "group")
    with session.cluster.state:
        store = vars(session.cluster).setdefault("store", dist.HashStore())
    group_context = GroupContext(session, 20.0, CallLog(members, store), 5.0)
    collectives = GroupCollectives(members, group_context, Completer())
    found = []
    for turn in range(2):
        with device.using(device.new_stream(device.device)):
            x = device.tensor(values(rank, (300,)))
            x.add_(turn)
            sums = x + 0
            share, root = torch.empty_like(x[:100]), x + 0
            rows, parts = torch.empty_like(x).expand(SIZE, 300).contiguous(), torch.empty_like(x)
            piece: Any = [torch.empty_like(x[:100]) for _ in range(SIZE)]
            means = [x * 2, x * 3]  # as averages of integers: made after the sums
            doubled = [collectives.reduce(Call("all_reduce", [each], 20.0), [each], Reduction()) for each in means]
            call = Call("combined", means, 20.0, lambda means=means: [each.div_(2) for each in means])
            combined = CombinedWork(group_context, call, doubled)
            works = [
                combined,
                collectives.reduce(Call("all_reduce", [sums], 20.0), [sums], Reduction()),
                collectives.reduce_scatter(Call("reduce_scatter", [share], 20.0), [x], Reduction()),
                collectives.broadcast(Call("broadcast", [root], 20.0), 1),
                collectives.move_evenly(Op.GATHER, "all_gather", x, rows, 20.0),
                collectives.move_evenly(Op.EXCHANGE, "all_to_all", x, parts, 20.0),
                collectives.move(
                    "exchange", GroupTransfer.exchange([[each] for each in x.chunk(SIZE)], [[e] for e in piece]), 20.0
                ),
            ]
        outputs = [means, [sums], [share], [root], [rows], [parts], piece]
        thread = threading.Thread(target=lambda works=works: [work.complete() for work in works])
        thread.start()
        thread.join()
        for work, results in zip(works, outputs, strict=True):
            with device.using(device.new_stream(device.device)):
                work.wait()
                found += [result.cpu() for result in results]
    collectives.finish()
    return found


def check_group_calls(results: Sequence[Sequence[torch.Tensor]]) -> None:
    for turn in range(2):
        x = [values(rank, (300,)) + turn for rank in range(SIZE)]
        total = contract(x, MACHINES)
        for rank, found in enumerate(results):
            twice, thrice, sums, share, root, rows, parts, *piece = found[turn * 10 : turn * 10 + 10]
            assert torch.equal(twice, contract([each * 2 for each in x], MACHINES) / 2)
            assert torch.equal(thrice, contract([each * 3 for each in x], MACHINES) / 2)
            exchanged = torch.cat([each.chunk(SIZE)[rank] for each in x])
            assert torch.equal(sums, total)
            assert torch.equal(share, total.chunk(SIZE)[rank])
            assert torch.equal(root, x[1])
            assert torch.equal(rows, torch.stack(x))
            assert torch.equal(parts, exchanged)
            assert torch.equal(torch.cat(list(piece)), exchanged)


def messages(rank: int, device: StandInDevice) -> list[torch.Tensor]:
    """From each rank to the next one, through the service: another thread completes them."""
    context, session = current(), cast(ThreadedSession, current().session)
    members = Members(context, session, tuple(range(SIZE)), rank, "group")
    group: Any = StubGroup()
    found = []
    send = ServiceChannel(members, group, (rank + 1) % SIZE, 0, True)
    receive = ServiceChannel(members, group, (rank - 1) % SIZE, 0, False)
    for turn in range(3):
        with device.using(device.new_stream(device.device)):
            x = device.tensor(values(rank, (300,)))
            x.add_(turn)
            output = torch.empty_like(x)
            works = [
                send.message(Call("send", [x], 10.0), True),
                receive.message(Call("receive", [output], 10.0), False),
            ]
            send.begin(works[0])
            receive.begin(works[1])
        thread = threading.Thread(target=lambda works=works: [work.complete() for work in works])
        thread.start()
        thread.join()
        with device.using(device.new_stream(device.device)):
            works[1].wait()
            found.append(output.cpu())
    return found


def check_messages(results: Sequence[Sequence[torch.Tensor]]) -> None:
    for rank, found in enumerate(results):
        for turn in range(3):
            assert torch.equal(found[turn], values((rank - 1) % SIZE, (300,)) + turn)


class SlowSession:
    """Takes contributions only after ``go``."""

    num_machines = 1

    def __init__(self) -> None:
        self.go = threading.Event()

    def hand_over(self, slot: object, nbytes: int | None = None, layout: object = None) -> None:
        self.go.wait(10.0)


def lifetimes(rank: int, device: StandInDevice) -> list[torch.Tensor]:
    """Tensors are freed, and memory goes to other slots, before copies are over."""
    session: Any = SlowSession()
    slot: Any = SimpleNamespace(spec=TensorSpec("x", DType.FLOAT32, (PAGE,)))
    memory = memoryview(mmap.mmap(-1, 8 * PAGE))
    device.watch(memory)
    view = torch.frombuffer(memory, dtype=torch.float32)
    copier = CudaCopier(device.device, device)
    with contextlib.ExitStack() as stack:
        stack.callback(session.go.set)
        stack.enter_context(device.using(device.new_stream(device.device)))
        x = device.tensor(values(rank, (PAGE,)))
        copier.adopt(memory[: 4 * PAGE])
        departures = [copier.send(session, slot, [view[:PAGE]], [x])]
        departures.append(copier.send(session, slot, [view[PAGE:]], [x + 1]))  # freed before it is copied
        y = torch.empty_like(x)
        copier.adopt(memory[: 6 * PAGE])  # another slot, of which a part is locked already
        copier.fetch([view[:PAGE]], [y])
        z = torch.empty_like(x)
        other = device.new_stream(device.device)
        other.wait_stream(device.current(device.device))
        with device.using(other):
            copier.fetch([view[:PAGE]], [z])
        del z  # before the stream that it came from has waited
        copier.adopt(memory)
        session.go.set()
        for departure in departures:
            departure.result(10.0)
        copier.send(session, slot, [view[PAGE:]], [y]).result(10.0)
        copier.fetch([view[:PAGE]], [x])
        session.go.clear()
        copier.send(session, slot, [view[PAGE:]], [x])
        closing = threading.Thread(target=copier.close)
        closing.start()
        while not copier._outgoing.qsize():  # what comes after the end
            closing.join(0.001)
        late = copier.send(session, slot, [view[PAGE:]], [x])
        copier.fetch([view[:PAGE]], [y])
        session.go.set()
        closing.join()
        assert isinstance(late.exception(10.0), NotInitializedError)
    assert not device.locked_pages
    return [y.cpu()]


def check_lifetimes(results: Sequence[Sequence[torch.Tensor]]) -> None:
    assert all(torch.equal(found[0], values(rank, (PAGE,))) for rank, found in enumerate(results))


def norms(rank: int, device: StandInDevice) -> list[torch.Tensor]:
    """Whether a gradient has changed since it was sent is found on the device, and read by the host later."""
    (view,) = current().slot_views([request("norms", device)])
    for is_changed in (False, True):
        checksums = GradientChecksums(Scratch(), lambda gradients: gradients)
        gradient = device.tensor(values(rank, (700,)))
        checksums.send(view, [gradient])
        view.wait()
        if is_changed:
            gradient.add_(1)
        assert checksums.changed([gradient]) is None
        assert checksums.changed_on_device() == (0 if is_changed else None)
    return []


def check_nothing(results: Sequence[Sequence[torch.Tensor]]) -> None: ...


def hosted_steps(rank: int, device: StandInDevice) -> list[torch.Tensor]:
    """Steps of hosted optimizers read parameters on other threads, as they were."""
    nothing: Any = None
    backward = BackwardSteps(current(), nothing, nothing, nothing)
    found: list[torch.Tensor] = []
    stream = device.new_stream(device.device)
    with device.using(stream):
        for _ in range(2):
            parameter = device.tensor(values(rank, (300,)))
            parameter.add_(1)
            params: Any = [parameter]
            (aside,) = backward.from_now({device.device})

            def read(parameter: torch.Tensor = parameter) -> None:
                found.append(parameter.cpu())

            def read_aside(aside: Any = aside, read: Any = read) -> None:
                with aside():
                    read()

            for run in (read_aside, _on_this_stream(cast(Any, read), params)):
                thread = threading.Thread(target=contextvars.copy_context().run, args=(run,))
                thread.start()
                thread.join()
    return found


def check_hosted_steps(results: Sequence[Sequence[torch.Tensor]]) -> None:
    for rank, found in enumerate(results):
        assert all(torch.equal(each, values(rank, (300,)) + 1) for each in found)
        assert len(found) == 4


def request(name: str, device: StandInDevice) -> TensorRequest:
    return TensorRequest(TensorSpec(name, DType.FLOAT32, (700,)), torch.float32, ((700,),), device.device)


Program = Callable[[int, StandInDevice], list[torch.Tensor]]
#: The shortest first: each call is left out in the first ones that make it.
PROGRAMS: list[tuple[Program, Callable[[Sequence[Sequence[torch.Tensor]]], None]]] = [
    (lifetimes, check_lifetimes),
    (gradients, check_gradients),
    (hooks, check_hooks),
    (own_messages, check_own_messages),
    (works, check_works),
    (norms, check_nothing),
    (turns, check_turns),
    (hosted_steps, check_hosted_steps),
    (messages, check_messages),
    (group_calls, check_group_calls),
    (places, check_places),
    (large_sums, check_large_sums),
    (gathers, check_gathers),
    (sums, check_sums),
]


def run(
    program: Program, shared_memory: bool, drop: Site | None = None
) -> tuple[list[list[torch.Tensor]], DeviceCluster]:
    cluster = DeviceCluster(MACHINES, shared_memory, drop)
    return cluster.on_devices(program), cluster


@pytest.mark.parametrize(
    "shared_memory",
    [pytest.param(True, id="one block"), pytest.param(False, marks=pytest.mark.slow, id="separate")],
)
@pytest.mark.parametrize(("program", "check"), PROGRAMS, ids=lambda each: each.__name__)
def test_sums_are_right_and_all_copies_are_ordered(program: Program, check: Any, shared_memory: bool) -> None:
    results, cluster = run(program, shared_memory)
    assert not cluster.races, "\n".join(cluster.races)
    check(results)


def every_call(rank: int, move: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """The operations of Horovod and BytePS, on a tensor that ``move`` brings to a device, or not."""
    x = move(values(rank, (6, 7)))
    whole = move(values(rank, (6, 7)).mul(1000).int())
    ops = (bps.Sum, bps.Average, bps.Min, bps.Max, bps.Product, bps.Adasum)
    found: list[torch.Tensor] = [bps.allreduce(x, op=op, name="x") for op in ops]
    found += [bps.allreduce(whole, op=op, name="whole") for op in (bps.Sum, bps.Average, bps.Max)]
    found.append(bps.allreduce(x, op=bps.Sum, name="scaled", prescale_factor=0.5, postscale_factor=3.0))
    found.append(bps.allreduce(x > 0, op=bps.Max, name="bool"))
    found += bps.grouped_allreduce([x, whole, x.half()], op=bps.Sum, name="group")
    found += bps.grouped_allgather([x[: rank + 1], whole[:1]], name="group")
    found += bps.grouped_reducescatter([x, x.double()], op=bps.Average, name="group")
    found.append(bps.allgather(x[: rank + 1].long(), name="rows"))
    found.append(bps.alltoall(x, [1, 2, 3], name="x")[0])
    found.append(bps.broadcast(whole, 2, name="whole"))
    found.append(bps.push_pull(x.t(), name="t"))
    found.append(bps.push_pull(x[0, 0], name="scalar"))
    y = x + 1
    bps.allreduce_(y, op=bps.Sum, name="in place")
    bps.broadcast_(y, 1, name="in place")
    handles = [bps.push_pull_async_inplace(y, average=True, name="async", priority=3)]
    handles.append(bps.allreduce_async(x * 2, op=bps.Sum, name="async"))
    found += [bps.synchronize(handle) for handle in handles]
    return [each.cpu() for each in found]


@pytest.mark.parametrize("shared_memory", [True, False], ids=["one block", "separate"])
def test_every_call_gives_what_host_tensors_give(shared_memory: bool) -> None:
    host = ThreadedCluster(MACHINES, shared_memory).run(lambda rank: every_call(rank, torch.clone))
    cluster = DeviceCluster(MACHINES, shared_memory)
    found = cluster.on_devices(lambda rank, device: every_call(rank, device.tensor))
    assert not cluster.races, "\n".join(cluster.races)
    for want, got in zip(host, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize(("compression", "most"), [(bps.Compression.none, 0), (bps.Compression.fp16, CHUNK_BYTES)])
def test_copies_take_little_memory_of_the_device(compression: Any, most: int) -> None:
    """None, or that of the chunk that is converted. (torch converts a result in memory of its own, unseen here.)"""

    def main(rank: int, device: StandInDevice) -> tuple[int, int]:
        x = device.tensor(values(rank, (4 * (1 << 20),)))
        bps.push_pull_inplace(x, average=False, name="x", compression=compression)
        before = device.most_bytes = device.used_bytes
        bps.push_pull_inplace(x, average=False, name="x", compression=compression)
        x.cpu()
        return before, device.most_bytes

    for before, after in DeviceCluster(MACHINES).on_devices(main):
        assert after - before <= most


def test_each_call_that_orders_copies_is_needed() -> None:
    """Without any one of them, a copy that nothing orders is found."""
    seen: dict[Site, list[Program]] = {}
    for program, _ in PROGRAMS:
        for site in run(program, True)[1].sites:
            seen.setdefault(site, []).append(program)
    assert {site.call for site in seen} >= {"record_event", "record_stream", "synchronize", "wait_event", "wait_stream"}
    missed = [
        site for site, programs in seen.items() if not any(run(program, True, site)[1].races for program in programs)
    ]
    assert not missed, "\n".join(map(str, missed))
