"""Operations of a process group while some ranks have no more data, and after all had none."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

import byteps_py.torch as bps
from backend.common import feature, rank, same, size
from backend.groups import groups, groups_of_two, pair
from byteps_py.session.peers import WINDOW


@feature
def after_uneven_data() -> None:
    for turn in range(2):
        for group, ranks, me in groups():
            for count in range(3):
                outputs = [torch.empty(2) for _ in ranks]
                dist.all_gather(outputs, torch.full((2,), float(me)), group=group)
                dist.all_reduce(torch.ones(70 + count), group=group)
                for known in (79, 10_000, 90_000):
                    dist.all_reduce(torch.ones(known), group=group)
        last = torch.full((5,), float(rank()))
        work = dist.all_reduce(last, group=groups_of_two(), async_op=True)
        for step in range(rank() + turn):  # the others have less data
            tensor = torch.ones(80 + step)
            dist.all_reduce(tensor)
            there = float(size() - max(0, step + 1 - turn))
            same(tensor, torch.full((80 + step,), there))
            # Of kinds that are known: from rank to rank, where that is possible, in a message, in memory, in shares.
            tensors = [torch.ones(count) for count in (79, 10_000, 90_000) for _ in range(2)]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for work in reversed(works):
                assert work is not None
                work.wait()
            same(tensors, [torch.full_like(tensor, there) for tensor in tensors])
            dist.barrier()
        bps.join()
        assert work is not None
        work.wait()  # what was under way is complete
        same(last, torch.full((5,), float(sum(pair()))))
        for group, ranks, me in groups():
            tensor = torch.full((70,), float(me))
            dist.all_reduce(tensor, group=group)
            same(tensor, torch.full((70,), float(sum(range(len(ranks))))))
            outputs = [torch.empty(2) for _ in ranks]
            dist.all_gather(outputs, torch.full((2,), float(me)), group=group)
            same(outputs, [torch.full((2,), float(other)) for other in range(len(ranks))])
        dist.send(torch.full((3,), float(rank())), (rank() + 1) % size(), tag=12)
        dist.recv(got := torch.empty(3), (rank() - 1) % size(), tag=12)
        same(got, torch.full((3,), float((rank() - 1) % size())))
        dist.barrier()


@feature
def what_has_a_root_after_a_join() -> None:
    """It is an error of all that have not joined, at the latest when it has been carried out a few times more."""
    for _ in range(2):
        for count in (5, 20_000):  # in a message, in memory
            tensor, parts = torch.full((count,), float(rank())), None
            dist.broadcast(tensor, 0)
            same(tensor, torch.zeros(count))
            if rank() == 0:
                parts = [torch.full((count,), float(r)) for r in range(size())]
            dist.scatter(tensor, parts, 0)
            same(tensor, torch.full((count,), float(rank())))
        if size() > 1 and rank() < size() - 1:
            for count in (5, 20_000):
                zeros = torch.zeros(count)
                fails_in_the_end(functools.partial(dist.broadcast, zeros, 0))
                fails_in_the_end(functools.partial(dist.scatter, zeros, [zeros] * size() if rank() == 0 else None, 0))
        bps.join()


def fails_in_the_end(operation: Callable[[], object]) -> None:
    succeeded, lead = 0, 8 * WINDOW  # between machines, one payload in eight is acknowledged
    for _ in range(3 * lead):
        try:
            operation()
            succeeded += 1
            assert succeeded <= lead, "an operation that needs all ranks succeeds though one has joined"
        except bps.JoinedError:
            succeeded = lead
