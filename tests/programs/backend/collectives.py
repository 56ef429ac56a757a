"""Collectives that move bytes, against what they must give; waiting and futures."""

from __future__ import annotations

import copy
import functools
import inspect
from datetime import timedelta

import torch
import torch.distributed as dist

import byteps_py.torch as bps
from backend.common import feature, raises, rank, same, size, values
from backend.groups import DTYPES, OTHER_DTYPES, given, groups


@feature
def all_gather() -> None:
    for group, ranks, me in groups():
        for dtype in (*DTYPES, *OTHER_DTYPES):
            parts = given(ranks, 3, 2, dtype=dtype)
            outputs = [torch.empty_like(parts[0]) for _ in ranks]
            dist.all_gather(outputs, parts[me], group=group)
            same(outputs, parts)
            whole = torch.empty(3 * len(ranks), 2, dtype=dtype)
            dist.all_gather_into_tensor(whole, parts[me], group=group)
            same([*whole.view(torch.uint8).chunk(len(ranks))], [part.view(torch.uint8) for part in parts])
        stacked = torch.empty(len(ranks), 3, 2)
        dist.all_gather_into_tensor(stacked, given(ranks, 3, 2)[me], group=group)
        same([*stacked], given(ranks, 3, 2))
        uneven = [torch.full((r + 1,), float(r)) for r in ranks]
        outputs = [torch.empty_like(part) for part in uneven]
        dist.all_gather(outputs, uneven[me], group=group)
        same(outputs, uneven)
        found: list[object] = [None] * len(ranks)
        dist.all_gather_object(found, {"rank": rank(), "text": "x" * rank()}, group=group)
        assert found == [{"rank": r, "text": "x" * r} for r in ranks]
        for count in (2, 10, 100_000):  # its memory grows
            outputs = [torch.empty(count) for _ in ranks]
            dist.all_gather(outputs, torch.full((count,), float(rank())), group=group)
            same(outputs, [torch.full((count,), float(r)) for r in ranks])


@feature
def all_to_all() -> None:
    for group, ranks, me in groups():
        n = len(ranks)
        for dtype in (torch.float32, torch.bool, torch.int64):
            parts = given(ranks, 2 * n, 3, dtype=dtype)
            output = torch.empty(2 * n, 3, dtype=dtype)
            dist.all_to_all_single(output, parts[me], group=group)
            same(output, torch.cat([part[2 * me : 2 * me + 2] for part in parts]))
        rows = [[(3 * a + b) % 4 for b in range(n)] for a in range(n)]  # from a to b; some nothing
        parts = [values(r, sum(rows[a]), 2) for a, r in enumerate(ranks)]
        expected = [parts[a].split(rows[a])[me] for a in range(n)]
        due = [rows[a][me] for a in range(n)]
        output = torch.empty(sum(due), 2)
        dist.all_to_all_single(output, parts[me], due, rows[me], group=group)
        same(output, torch.cat(expected))
        outputs = [torch.empty(count, 2) for count in due]
        dist.all_to_all(outputs, [*parts[me].split(rows[me])], group=group)
        same(outputs, expected)


@feature
def gather_and_scatter() -> None:
    for group, ranks, me in groups():
        for root in ranks:
            parts = given(ranks, 2, 3, dtype=torch.float16)
            outputs = [torch.empty_like(part) for part in parts] if rank() == root else None
            dist.gather(parts[me], outputs, root, group=group)
            if outputs is not None:
                same(outputs, parts)
            inputs = given(ranks, 4, seed=root) if rank() == root else None
            output = torch.empty(4)
            dist.scatter(output, inputs, root, group=group)
            same(output, given(ranks, 4, seed=root)[me])
        found: list[object] | None = [None] * len(ranks) if rank() == ranks[-1] else None
        dist.gather_object(("of", rank()), found, ranks[-1], group=group)
        assert found is None or found == [("of", r) for r in ranks]
        said = [f"from {ranks[0]}", {"n": len(ranks)}] if me == 0 else [None, None]
        dist.broadcast_object_list(said, ranks[0], group=group)
        assert said == [f"from {ranks[0]}", {"n": len(ranks)}]
        mine: list[object] = [None]
        dist.scatter_object_list(mine, [("for", r) for r in ranks], ranks[0], group=group)
        assert mine == [("for", rank())]


@feature
def send_and_receive() -> None:
    for group, ranks, me in groups():
        n = len(ranks)
        if n == 1:
            continue
        after, before = ranks[(me + 1) % n], ranks[(me - 1) % n]
        for count in (1, 1000, 3, 0, 100_000):  # memory grows while earlier messages may still be unread
            sent, got = torch.full((count,), float(rank())), torch.empty(count)
            dist.send(sent, after, group=group)
            dist.recv(got, before, group=group)
            same(got, torch.full((count,), float(before)))
        messages = [
            torch.full((3 + i,), float(rank() + i)) for i in range(12)
        ]  # more than are kept for a late receiver
        works = [dist.isend(message, after, group=group) for message in messages]
        inbox = [torch.empty(3 + i) for i in range(12)]
        works += [dist.irecv(tensor, before, group=group) for tensor in inbox]
        for work in works:
            assert work is not None
            work.wait()
        same(inbox, [torch.full((3 + i,), float(before + i)) for i in range(12)])
        ops = [
            dist.P2POp(dist.irecv, got := torch.empty(2), before, group),
            dist.P2POp(dist.isend, torch.full((2,), rank() * 1.0), after, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        same(got, torch.full((2,), float(before)))


@feature
def messages_to_the_own_rank() -> None:
    """The n-th receive takes the n-th send with its tag, whichever comes first; a send may change its tensor later."""
    for group, ranks, me in groups():
        sent = [torch.full((3,), float(10 * rank() + number)) for number in range(4)]
        got = [torch.empty(3) for _ in range(4)]
        ops = [dist.P2POp(dist.irecv, got[0], group=group, tag=1, group_peer=me)]
        ops += [dist.P2POp(dist.isend, one, group=group, tag=1, group_peer=me) for one in sent[:2]]
        ops += [dist.P2POp(dist.irecv, got[1], group=group, tag=1, group_peer=me)]
        works = dist.batch_isend_irecv(ops)
        group.send([sent[2]], me, 2).wait()
        expected = [one.clone() for one in sent]
        sent[2].zero_()
        works.append(group.recv([got[2]], me, 2))
        late = group.recv([got[3]], me, 2)
        assert not late.is_completed()
        group.send([sent[3]], me, 2)
        for work in (*works, late):
            work.wait()
        same(got, expected)
        group.send([torch.ones(2)], me, 3)
        raises(bps.MismatchError, "a message of 8 bytes came, 12", lambda: group.recv([got[0]], me, 3).wait())  # noqa: B023
        assert late.source_rank() == me
        assert ranks[me] == rank()


@feature
def tags_and_any_source() -> None:
    _, ranks, me = next(groups())
    after, before = (me + 1) % size(), (me - 1) % size()
    dist.send(torch.tensor([1.0]), after, tag=1)
    dist.send(torch.tensor([2, 2]), after, tag=2)
    one, two = torch.empty(1), torch.empty(2, dtype=torch.int64)
    dist.recv(two, before, tag=2)
    dist.recv(one, before, tag=1)
    same([one, two], [torch.tensor([1.0]), torch.tensor([2, 2])])
    if me:
        dist.send(torch.tensor([float(me)]), 0, tag=7)
        dist.send(torch.tensor([10.0 * me, me]), 0, tag=7)
    else:
        seen = []
        for _ in ranks[1:]:
            tensor = torch.empty(1)
            seen.append(dist.recv(tensor, tag=7))
            assert tensor.item() == seen[-1]
            more = torch.empty(2)
            dist.recv(more, seen[-1], tag=7)
            same(more, torch.tensor([10.0 * seen[-1], seen[-1]]))
        assert sorted(seen) == ranks[1:]
    dist.barrier()
    # Receives from anybody and from one, of any sizes, of one tag: what was posted in vain is of another size.
    for turn in range(2):
        if me:
            for count in (1, 5, 0, 30_000, 2):
                dist.send(torch.full((count,), float(me + turn)), 0, tag=8)
        else:
            got = torch.empty(1)
            first = dist.recv(got, tag=8)
            same(got, torch.full((1,), float(first + turn)))
            others = [r for r in ranks[1:] if r != first]
            for source in others:
                for count in (1, 5, 0):
                    dist.recv(got := torch.empty(count), source, tag=8)
                    same(got, torch.full((count,), float(source + turn)))
            works = [dist.irecv(torch.empty(count), first, tag=8) for count in (5, 0)]
            for work in works:
                assert work is not None
                work.wait()
            for _ in ranks[1:]:
                got = torch.empty(30_000)
                source = dist.recv(got, tag=8)
                same(got, torch.full((30_000,), float(source + turn)))
                dist.recv(got := torch.empty(2), source, tag=8)
                same(got, torch.full((2,), float(source + turn)))
        dist.barrier()  # what comes first is for the next receive


@feature
def sizes_that_differ() -> None:
    """An error of that call, on those who disagree; the group goes on."""
    for group, ranks, me in groups():
        n = len(ranks)
        if n == 1:
            continue
        zero, one = ranks[0], ranks[1]
        for sent, due in ((3, 2), (0, 2), (3, 0)):
            # Rank ``zero`` sends a number of rows to rank ``one``, which expects another number.
            rows = [sent if (me, b) == (0, 1) else 1 for b in range(n)]
            expected = [due if (a, me) == (0, 1) else 1 for a in range(n)]
            output = torch.empty(sum(expected), 2)
            call = functools.partial(
                dist.all_to_all_single, output, values(rank(), sum(rows), 2), expected, rows, group=group
            )
            text = f"rank {zero} sends {8 * sent} bytes to rank {one}, which expects {8 * due}"
            if me < 2:
                raises(bps.MismatchError, text, call)
            else:
                call()
                rest = [values(r, sent + n - 1 if a == 0 else n, 2) for a, r in enumerate(ranks)]
                lengths = [[sent if (a, b) == (0, 1) else 1 for b in range(n)] for a in range(n)]
                same(output, torch.cat([part.split(lengths[a])[me] for a, part in enumerate(rest)]))
            # Rank ``one`` believes that rank ``zero`` gathers another number.
            outputs = [torch.empty(due if (a, me) == (0, 1) else sent if a == 0 else 1, 2) for a in range(n)]
            call = functools.partial(dist.all_gather, outputs, torch.ones(outputs[me].shape), group=group)
            if me < 2:
                raises(bps.MismatchError, f"rank {zero}", call)
            else:
                try:  # on the machine of rank ``one`` ranks may be unable to tell who of them is right
                    call()
                except bps.MismatchError as error:
                    assert f"rank {one}" in str(error)  # noqa: PT017
            # If only one side waits, that side raises the error.
            gathered = [torch.empty(due if a == 1 else 1) for a in range(n)] if me == 0 else None
            call = functools.partial(dist.gather, torch.ones(sent if me == 1 else 1), gathered, zero, group=group)
            text = f"rank {one} sends {4 * sent} bytes to rank {zero}, which expects {4 * due}"
            raises(bps.MismatchError, text, call) if me == 0 else call()
            scattered = [torch.ones(sent if a == 1 else 1) for a in range(n)] if me == 0 else None
            call = functools.partial(dist.scatter, torch.empty(due if me == 1 else 1), scattered, zero, group=group)
            text = f"rank {zero} sends {4 * sent} bytes to rank {one}, which expects {4 * due}"
            raises(bps.MismatchError, text, call) if me == 1 else call()
            for count, wanted in ((sent, due), (4, 4), (sent, due), (7, 7)):
                if me == 0:
                    dist.send(torch.full((count,), 5.0), one, group=group, tag=5)
                elif me == 1:
                    got = torch.empty(wanted)
                    call = functools.partial(dist.recv, got, zero, group=group, tag=5)
                    text = f"rank {zero} sends {4 * count} bytes to rank {one}, which expects {4 * wanted}"
                    raises(bps.MismatchError, text, call) if count != wanted else call()
                    assert count != wanted or got.tolist() == [5.0] * count
            parts = given(ranks, 2 * n, 3)
            output = torch.empty(2 * n, 3)
            dist.all_to_all_single(output, parts[me], group=group)
            same(output, torch.cat([part[2 * me : 2 * me + 2] for part in parts]))
            outputs = [torch.empty_like(part) for part in parts]
            dist.all_gather(outputs, parts[me], group=group)
            same(outputs, parts)
    if rank() < 2:  # a message of another size than anybody's receive
        if rank():
            for count in (3, 2, 4):
                dist.send(torch.full((count,), 1.0), 0, tag=6)
        else:
            raises(bps.MismatchError, "rank 1 sends 12 bytes", lambda: dist.recv(torch.empty(1), tag=6))
            dist.recv(got := torch.empty(2), tag=6)
            dist.recv(got := torch.empty(4), 1, tag=6)
            same(got, torch.ones(4))
    dist.barrier()


@feature
def barriers() -> None:
    for group, _, _ in groups():
        dist.barrier(group)
        work = dist.barrier(group, async_op=True)
        assert work is not None
        work.wait()
        group.monitored_barrier(timedelta(seconds=30))
    if rank() != size() - 1:
        world = dist.group.WORLD
        assert world is not None
        text = (
            f"Rank {size() - 1} failed to pass monitoredBarrier"
            if rank() == 0
            else f"Rank {rank()} successfully reached"
        )
        raises(bps.StallError, text, lambda: world.monitored_barrier(timedelta(seconds=0.5)))
    dist.barrier()


@feature
def work_and_futures() -> None:
    _, ranks, me = next(groups())
    tensor = torch.full((6,), float(me))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    assert work.wait(timedelta(seconds=60)) is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    same(work.result(), [tensor])
    tensor = torch.full((6,), float(me))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    other = torch.full((3,), float(me))

    def callback(future: torch.futures.Future[list[torch.Tensor]]) -> float:
        dist.all_reduce(other)  # on a thread of the pool, and while it waits for others
        return future.value()[0][0].item() + other[0].item()

    assert work.get_future().then(callback).wait() == 2 * sum(ranks)
    got = torch.empty(1)
    work = dist.irecv(got, (me - 1) % size())
    assert work is not None
    dist.send(torch.tensor([float(me)]), (me + 1) % size())
    work.wait()
    assert work._source_rank() == (me - 1) % size()


@feature
def split_groups() -> None:
    world = dist.group.WORLD
    assert world is not None
    assert copy.deepcopy(world.options)._timeout == world.options._timeout
    sides = [[r for r in range(size()) if r % 2 == side] for side in (0, 1)]
    for number, ranks in enumerate((sides, sides, [sides[1]])):
        if torch.__version__ >= "2.15":
            group = dist.split_group(world, ranks)
        else:  # torch itself splits groups on machines with an accelerator only
            mine = next((some for some in ranks if rank() in some), ranks[0])
            options = copy.deepcopy(world.options)
            group = world.split_group(mine, timedelta(seconds=50), options, f"split{number}", None, None)
        members = next((some for some in ranks if rank() in some), None)
        if members is None:
            assert group in (None, dist.GroupMember.NON_GROUP_MEMBER)
            continue
        assert (group.rank(), group.size()) == (members.index(rank()), len(members))
        tensor = torch.full((4,), float(rank()))
        group.allreduce([tensor]).wait()
        same(tensor, torch.full((4,), float(sum(members))))
        outputs = [torch.empty(2) for _ in members]
        group.allgather([outputs], [torch.full((2,), float(rank()))]).wait()
        same(outputs, [torch.full((2,), float(r)) for r in members])
        group.shutdown()
    backwards = functools.partial(dist.new_group, list(reversed(range(size()))), sort_ranks=False)
    if "sort_ranks" in inspect.signature(dist.new_group).parameters and size() > 1:
        raises(bps.UnsupportedError, "in ascending order only", backwards)


@feature
def with_the_own_interface() -> None:
    assert bps.is_initialized()
    assert (bps.rank(), bps.size()) == (rank(), size())
    same(
        bps.push_pull(torch.full((3,), float(rank())), average=False, name="own"),
        torch.full((3,), sum(range(size())) * 1.0),
    )
