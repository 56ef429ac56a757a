"""One rank of benchmarks/cluster: times reductions of a list of float32 tensors, as it is told to.

A word is "prepare CALL COUNTS" or "time CALL COUNTS REPEATS APART", COUNTS being the elements of each tensor, in order
of the forward pass, and APART 1 if all ranks wait for each other before each call. Rank 0 answers with the times. A
tensor holds rank + 1 everywhere when its call is prepared, the sum of that is checked, and then it holds zeros, which
any number of sums leaves as they are.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from benchmarks.turns import orders

WARM_UP = 1
WARM_UP_SMALL = 10
SMALL_BYTES = 8 << 20
GLOO_BUCKET_BYTES = 25 << 20  # DDP's
PARAMETERS = 8  # equal ones, of a model of one tensor's size
LEARNING_RATE = 0.125
CONNECT_S = 30.0
LATE_VARIABLE = "BENCHMARK_LATE_S"
_CHUNK_BYTES = 256 << 10

#: The public calls of ours; "session" is the layer below: memory that is shared with the services already.
OURS = (
    "session", "push_pull_inplace", "push_pull", "allreduce_", "optimizer", "hosted_machine", "hosted_sharded",
    "all_reduce",
)  # fmt: skip
#: The argument ``hosted`` of those that are steps of an optimizer; their peer is DistributedDataParallel.
STEPS: dict[str, bool | str] = {"optimizer": False, "hosted_machine": "machine", "hosted_sharded": "sharded"}
#: push_pull with a compression: the form in which a tensor of random numbers travels.
COMPRESSED = (
    "bf16", "int8", "float8", "float8_e5m2", "thc", "dithering", "onebit", "topk", "topk_ef", "randomk_ef",
)  # fmt: skip
#: A training step of one square matrix, whose gradients travel as factors of low rank.
POWERSGD, POWERSGD_HOOK, RANK = "powersgd", "ddp_powersgd", 4
#: An allgather of tensors of ``counts`` elements in all.
GATHER = "allgather"
#: Their peers: gloo's all_reduce, and DistributedDataParallel over gloo.
GLOO = ("gloo", "ddp", POWERSGD_HOOK)
ECHO = ("tcp_echo",)

Call = Callable[[], object]


def named_calls(
    prefix: str, tensors: list[Any], together: Callable[..., Any], begin: Callable[..., int], **how: Any
) -> Callable[[], list[Any]]:
    """A call of ``together`` for one tensor; for several, of ``begin``, and then the wait for all of them."""
    import byteps_py as bps

    names = [f"{prefix} {tensor.numel()} {i}" for i, tensor in enumerate(tensors)]
    if len(tensors) == 1:
        return lambda: [together(tensors[0], name=names[0], **how)]

    def call() -> list[Any]:
        handles = [begin(tensor, name=name, **how) for tensor, name in zip(tensors, names, strict=True)]
        return [bps.synchronize(handle) for handle in handles]

    return call


class Contender(Protocol):
    rank: int

    def prepare(self, name: str, counts: list[int]) -> Call: ...

    def barrier(self) -> object: ...

    def close(self) -> None: ...


def wrong(name: str) -> SystemExit:
    return SystemExit(f"{name}: wrong sum")


class Ours:
    def __init__(self) -> None:
        import torch.distributed as dist

        import byteps_py as bps

        bps.init()
        dist.init_process_group("byteps")
        self.rank, self.size = bps.rank(), bps.size()
        self.barrier = bps.barrier

    def prepare(self, name: str, counts: list[int]) -> Call:
        if name == "session":
            return self._slots(counts)
        if name in STEPS:
            return self._step(name, counts)
        if name in COMPRESSED:
            return self._compressed(name, counts)
        if name == GATHER:
            return self._gather(counts)
        if name == POWERSGD:
            return self._factors(counts)
        return checked(name, counts, self.rank, self.size, getattr(self, f"_{name}"))

    def _push_pull_inplace(self, tensors: list[Any]) -> Callable[[], list[Any]]:
        import byteps_py as bps

        return named_calls("inplace", tensors, bps.push_pull_inplace, bps.push_pull_async_inplace, average=False)

    def _push_pull(self, tensors: list[Any]) -> Callable[[], list[Any]]:
        import byteps_py as bps

        return named_calls("new", tensors, bps.push_pull, bps.push_pull_async, average=False)

    def _allreduce_(self, tensors: list[Any]) -> Callable[[], list[Any]]:
        import byteps_py as bps

        return named_calls("allreduce", tensors, bps.allreduce_, bps.allreduce_async_, op=bps.Sum)

    def _all_reduce(self, tensors: list[Any]) -> Callable[[], list[Any]]:
        return all_reduce(tensors)

    def _step(self, name: str, counts: list[int]) -> Call:
        import torch

        import byteps_py as bps

        model, prefix = parameters(counts), f"{name} {sum(counts)} in {len(counts)}"
        named = [(f"{prefix}: {each}", parameter) for each, parameter in model.named_parameters()]
        sgd = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        return step(model, bps.DistributedOptimizer(sgd, named, hosted=STEPS[name]), self.rank, self.size)

    def _factors(self, counts: list[int]) -> Call:
        import torch

        import byteps_py as bps

        model = matrix(counts)
        sgd = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        named = [(f"{POWERSGD}: {name}", parameter) for name, parameter in model.named_parameters()]
        return low_rank_step(model, bps.DistributedOptimizer(sgd, named, bps.Compression.powersgd(RANK)), self.rank)

    def _gather(self, counts: list[int]) -> Call:
        import torch

        import byteps_py as bps

        parts = [torch.full((count // self.size,), self.rank + 1.0) for count in counts]
        expected = [torch.arange(1.0, self.size + 1).repeat_interleave(len(part)) for part in parts]

        def call() -> list[Any]:
            return [bps.allgather(part, name=f"gather {len(part)} {i}") for i, part in enumerate(parts)]

        if not all(map(torch.equal, call(), expected)):
            raise wrong(GATHER)
        return call

    def _compressed(self, name: str, counts: list[int]) -> Call:
        """Random tensors of the same sum, so that each rank can check what comes of it; zeros would be too easy."""
        import torch

        import byteps_py as bps

        of = bps.Compression
        made = {
            "topk": lambda: of.topk(0.01),
            "topk_ef": lambda: of.topk(0.01, error_feedback=True),
            "randomk_ef": lambda: of.randomk(0.01, error_feedback=True),
            "dithering": lambda: of.dithering(7),
            "onebit": of.onebit,
            "thc": of.thc,
        }
        compression = made[name]() if name in made else getattr(of, name)
        tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)) * (self.rank + 1) for n in counts]
        call = named_calls(name, tensors, bps.push_pull, bps.push_pull_async, average=False, compression=compression)
        ranks = self.size * (self.size + 1) // 2 / (self.rank + 1)
        for result, tensor in zip(call(), tensors, strict=True):
            due = tensor * ranks
            if name == "onebit":
                if not torch.equal(result < 0, due < 0):
                    raise wrong(name)
                continue
            if name.startswith(("topk", "randomk")):  # some elements, and no others
                due = torch.where(result == 0, 0.0, due)
                if not 0 < int(result.count_nonzero()) < len(result) / 50:
                    raise wrong(name)
            if not (result - due).abs().max() <= (0.4 if name == "dithering" else 0.1) * due.abs().max():
                raise wrong(name)
        return call

    def _slots(self, counts: list[int]) -> Call:
        import numpy as np

        from byteps_py.config.settings import Settings
        from byteps_py.tensors import PRIORITY_READY_ORDER, DType, TensorSpec
        from byteps_py.torch.collectives.context import current
        from byteps_py.torch.gradients.bucket import plan_buckets

        session = current().session
        # As DistributedOptimizer does: small gradients travel together, back layers come first, as a backward pass
        # produces them, and none has priority.
        fusion_bytes = Settings.from_env().fusion_bytes
        buckets = plan_buckets([count * 4 for count in counts], [0] * len(counts), fusion_bytes)
        totals = {min(bucket): sum(counts[i] for i in bucket) for bucket in buckets}
        slots = session.declare(
            [
                TensorSpec(f"slot {total} {first}", DType.FLOAT32, (total,), priority=PRIORITY_READY_ORDER)
                for first, total in totals.items()
            ]
        )
        for slot in slots:
            for memory in slot.inputs:
                np.frombuffer(memory, np.float32)[:] = 1 + self.rank

        def call() -> None:
            for slot in slots:
                session.hand_over(slot)
            for slot in slots:
                session.wait(slot)

        call()
        expected = self.size * (self.size + 1) // 2
        if any((np.frombuffer(slot.result, np.float32) != expected).any() for slot in slots):
            raise wrong("session")
        return call

    def close(self) -> None:
        import torch.distributed as dist

        import byteps_py as bps

        dist.destroy_process_group()
        bps.shutdown()


class Gloo:
    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.barrier = dist.barrier

    def prepare(self, name: str, counts: list[int]) -> Call:
        import torch

        if name == "gloo":
            buckets: list[int] = []
            for count in counts:
                if buckets and (buckets[-1] + count) * 4 <= GLOO_BUCKET_BYTES:
                    buckets[-1] += count
                else:
                    buckets.append(count)
            return checked(name, buckets, self.rank, self.size, all_reduce)
        if name == POWERSGD_HOOK:
            return self._hooked(counts)
        model = parameters(counts)
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return step(wrapped, torch.optim.SGD(model.parameters(), LEARNING_RATE), self.rank, self.size)

    def _hooked(self, counts: list[int]) -> Call:
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        model = matrix(counts)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        sgd = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        return low_rank_step(wrapped, sgd, self.rank, steps=3)

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


def all_reduce(tensors: list[Any]) -> Callable[[], list[Any]]:
    import torch.distributed as dist

    def call() -> list[Any]:
        if len(tensors) == 1:
            dist.all_reduce(tensors[0])
        else:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()
        return tensors

    return call


def checked(
    name: str, counts: list[int], rank: int, size: int, make: Callable[[list[Any]], Callable[[], list[Any]]]
) -> Call:
    import torch

    tensors = [torch.full((count,), rank + 1.0) for count in counts]
    call = make(tensors)
    expected = float(size * (size + 1) // 2)
    if any(not torch.equal(result, torch.full_like(result, expected)) for result in call()):
        raise wrong(name)
    for tensor in tensors:
        tensor.zero_()
    return call


def parameters(counts: list[int]) -> Any:
    """A model whose loss is the sum of all its parameters, so that a gradient costs one write."""
    import torch

    class Parameters(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = counts
            if len(counts) == 1:
                parts = [len(range(i, counts[0], PARAMETERS)) for i in range(min(PARAMETERS, counts[0]))]
            self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(count)) for count in parts)

        def forward(self) -> torch.Tensor:
            return torch.stack([parameter.sum() for parameter in self.all]).sum()

    return Parameters()


def matrix(counts: list[int]) -> Any:
    """A model with a square matrix of so many elements, and a loss with a gradient of low rank."""
    import torch

    width = round(sum(counts) ** 0.5)

    class Matrix(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(width, width))

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return ((left @ self.weight) * right).sum()

    return Matrix()


def low_rank_step(model: Any, optimizer: Any, rank: int, steps: int = 1) -> Call:
    """A training step, after so many that prepare it. The gradient is rank + 1 times a matrix of rank 2."""
    import torch

    width = next(model.parameters()).shape[0]
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, width, generator=generator), torch.randn(2, width, generator=generator)

    def call() -> None:
        optimizer.zero_grad()
        (model(left, right) * (rank + 1)).backward()
        optimizer.step()

    for _ in range(steps):
        call()
    return call


def step(model: Any, optimizer: Any, rank: int, size: int) -> Call:
    """A training step: its gradients are rank + 1, of which the mean is taken."""
    import torch

    def call() -> None:
        optimizer.zero_grad()
        (model() * (rank + 1)).backward()
        optimizer.step()

    call()
    for parameter in model.parameters():
        # Not torch.equal: whether a mean is divided or multiplied is each contender's own affair.
        if not torch.allclose(parameter, torch.full_like(parameter, -LEARNING_RATE * (size + 1) / 2)):
            raise wrong("a step")
    return call


class Echo:
    """Blocking sockets, and nothing else: rank 1 sends a tensor's bytes to rank 0, which sends them back as they come.
    So both send and receive as much as each machine of a pair does that sums a tensor."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._buffer = memoryview(bytearray(_CHUNK_BYTES))
        if self.rank == 0:
            with socket.create_server(address) as listener:
                listener.settimeout(CONNECT_S)
                self._socket = listener.accept()[0]
        else:
            self._socket = connected(address)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._outgoing: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send)
        self._sender.start()

    def _send(self) -> None:
        while (data := self._outgoing.get()) is not None:
            self._socket.sendall(data)

    def prepare(self, name: str, counts: list[int]) -> Call:
        data = memoryview(bytearray(b"x" * (sum(counts) * 4)))

        def call() -> None:
            if self.rank:
                self._outgoing.put(data)
            received = 0
            while received < len(data):
                count = self._socket.recv_into(self._buffer[: min(_CHUNK_BYTES, len(data) - received)])
                if not count:
                    raise SystemExit("the echo's other side has ended")
                if not self.rank:
                    self._socket.sendall(self._buffer[:count])
                received += count

        return call

    def barrier(self) -> None:
        """A call begins with rank 1, and rank 0 waits for it anyway."""

    def close(self) -> None:
        self._outgoing.put(None)
        self._sender.join()
        self._socket.close()


def connected(address: tuple[str, int]) -> socket.socket:
    deadline_s = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection(address, CONNECT_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def timed(contender: Contender, call: Call, repeats: int, is_apart: bool) -> list[float]:
    """With BENCHMARK_LATE_S, rank 0 comes so much later than the others, and its times are those from its coming until
    all ranks have the sum."""
    times = []
    late_s = float(os.environ.get(LATE_VARIABLE, "0"))
    contender.barrier()
    for number in range(repeats):
        if is_apart and number:
            contender.barrier()
        if late_s and contender.rank == 0:
            time.sleep(late_s)
        began = time.perf_counter()
        call()
        if late_s:
            contender.barrier()
        times.append(time.perf_counter() - began)
    return times


def main(arguments: Sequence[str]) -> None:
    contender: Contender = {"ours": Ours, "gloo": Gloo, "echo": Echo}[arguments[0]]()
    answers = 1 if arguments[0] == "echo" else 0
    calls: dict[tuple[str, str], Call] = {}
    with orders() as words:
        for word, answer in words:
            what, name, listed, *rest = word.split()
            if what == "prepare":
                counts = [int(count) for count in listed.split(",")]
                call = calls[name, listed] = contender.prepare(name, counts)
                for _ in range(WARM_UP_SMALL if sum(counts) * 4 <= SMALL_BYTES else WARM_UP):
                    call()
                answer(None)
                continue
            times = timed(contender, calls[name, listed], int(rest[0]), rest[1] == "1")
            answer(times if contender.rank == answers else None)
    contender.close()


if __name__ == "__main__":
    main(sys.argv[1:])
