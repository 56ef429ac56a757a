"""Sums with each codec, and a training, compared with machines and a server that are emulated in this process. Run by
tests/jobs/test_compression.py under bpslaunch; prints a digest of all results. Arguments: names of codecs, join,
rules, go on, fail, or hosted; none: all codecs. With BYTEPS_NONFINITE=raise, a gradient is infinite.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for support
from support.coded_sums import CodedSums, scaled

import byteps_py as bps
from byteps_py.torch.run.compression_state import load_of_machine

torch.set_num_threads(1)
C = bps.Compression
CODECS = {
    "int8": C.int8,
    "float8": C.float8,
    "e5m2": C.float8_e5m2,
    "topk": C.topk(0.01),
    "int8 ef": C.with_error_feedback(C.int8),
    "topk ef": C.topk(0.05, error_feedback=True),
    "topk of 2 bits": C.topk(0.05, error_feedback=True, bits=2),
    "onebit ef": C.with_momentum(C.onebit(error_feedback=True), 0.9),
    "onebit": C.onebit(scaling=False),
    "randomk": C.randomk(0.1, seed=5),
    "randomk ef": C.randomk(0.1, error_feedback=True),
    "linear": C.dithering(7, seed=3),
    "thc": C.thc(),
    "thc wide": C.with_momentum(C.thc(lanes=16), 0.5),
    "natural ef": C.dithering(7, "natural", "l2", error_feedback=True),
}
#: With partitions of 64 KB, the first is cut.
SHAPES = [((300, 1001), torch.float32), ((5_000,), torch.bfloat16), ((20_011,), torch.float16), ((0,), torch.float32)]
SHAPES = SHAPES[:1] if "TEST_FLOAT32" in os.environ else SHAPES
ROUNDS = 3


def contribution(rank: int, number: int, round_: int) -> torch.Tensor:
    """What ``rank`` gives: known to all ranks, so that each can check the result."""
    shape, dtype = SHAPES[number]
    generator = torch.Generator().manual_seed(10_000 * round_ + 100 * number + rank)
    return (torch.randn(shape, generator=generator) * 0.1 ** (round_ + number)).to(dtype)


def sums(name: str, digest: hashlib._Hash) -> None:
    compression, local = CODECS[name], bps.local_size()
    assert compression.codec is not None
    expected = [CodedSums(compression.codec, local, f"{name} {number}") for number in range(len(SHAPES))]
    for round_ in range(ROUNDS):
        for number, model in enumerate(expected):
            given = [contribution(rank, number, round_) for rank in range(bps.size())]
            average = number != 1
            found = bps.push_pull(given[bps.rank()], average, f"{name} {number}", compression=compression)
            due = model(given, bps.size() if average else 1)
            if not torch.equal(found, due):
                by = (found - due).abs().max()
                sys.exit(f"rank {bps.rank()}: {name}, tensor {number}, round {round_} differs by {by}")
            digest.update(found.view(torch.uint8).numpy().tobytes())


def network() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(70, 300), torch.nn.Tanh(), torch.nn.Linear(300, 3, bias=False))


def gradients(net: torch.nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    net.zero_grad()
    net(torch.randn(4, 70, generator=generator)).pow(2).sum().backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def training(name: str, digest: hashlib._Hash) -> None:
    """Each gradient travels alone (BYTEPS_FUSION_BYTES=0)."""
    compression = CODECS[name]
    net, same = network(), network()
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
        [(f"{name} {key}", parameter) for key, parameter in net.named_parameters()],
        compression,
    )
    plain = torch.optim.SGD(same.parameters(), lr=0.01, momentum=0.9)
    assert compression.codec is not None
    models = [
        CodedSums(compression.codec, bps.local_size(), f"Gradient.{name} {key}") for key, _ in net.named_parameters()
    ]
    for step in range(ROUNDS):
        gradients(net, bps.rank(), step)
        optimizer.step()
        given = [gradients(same, rank, step) for rank in range(bps.size())]
        for i, (parameter, model) in enumerate(zip(same.parameters(), models, strict=True)):
            parameter.grad = model([each[i] for each in given], bps.size())
        plain.step()
        for mine, theirs in zip(net.parameters(), same.parameters(), strict=True):
            if not torch.equal(mine, theirs):
                sys.exit(f"rank {bps.rank()}: {name}, step {step} differs by {(mine - theirs).abs().max()}")
            digest.update(mine.detach().numpy().tobytes())


def by_rules(digest: hashlib._Hash) -> None:
    """Each parameter has its own compression, from the second step on."""
    chosen = {"0.weight": C.int8, "0.bias": C.none, "2.weight": C.randomk(0.1, error_feedback=True)}
    rules = C.rules([(f"by rules {key}", each) for key, each in chosen.items()], warmup_steps=1)
    net, same = network(), network()
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.01),
        [(f"by rules {key}", parameter) for key, parameter in net.named_parameters()],
        rules,
    )
    plain = torch.optim.SGD(same.parameters(), lr=0.01)
    models = {
        key: CodedSums(each.codec, bps.local_size(), f"Gradient.by rules {key}")
        for key, each in chosen.items()
        if each.codec is not None
    }
    for step in range(4):
        gradients(net, bps.rank(), step)
        optimizer.step()
        given = [gradients(same, rank, step) for rank in range(bps.size())]
        for i, (key, parameter) in enumerate(same.named_parameters()):
            parts = [each[i] for each in given]
            model = models.get(key) if step else None
            # Of two ranks, there is one order of adding.
            parameter.grad = model(parts, bps.size()) if model else (parts[0] + parts[1]) / bps.size()
        plain.step()
        for mine, theirs in zip(net.parameters(), same.parameters(), strict=True):
            if not torch.equal(mine, theirs):
                sys.exit(f"rank {bps.rank()}: rules, step {step} differs by {(mine - theirs).abs().max()}")
            digest.update(mine.detach().numpy().tobytes())


def not_finite(name: str, digest: hashlib._Hash) -> None:
    """With BYTEPS_NONFINITE=raise: the last rank's gradients are infinite in one step. It is named on all ranks, and
    training goes on."""
    net = network()
    named = [(f"{name} {key}", parameter) for key, parameter in net.named_parameters()]
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), named, CODECS[name])
    last, step = bps.size() - 1, 0

    def poison(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad[7, 5] = float("inf") if step == 1 else grad[7, 5]
        return grad

    if bps.rank() == last:
        net[0].weight.register_hook(poison)
    for step in range(3):
        gradients(net, bps.rank(), step)
        try:
            optimizer.step()
            said = ""
        except bps.NonFiniteError as error:
            said = str(error)
        place = f"NaN or infinity from rank {last}, step 2: in the gradients of '{name} 0.weight'"
        if said.startswith(place) != (step == 1):
            sys.exit(f"rank {bps.rank()}: {name}, step {step}: {said}")
    assert all(parameter.isfinite().all() for parameter in net.parameters())
    digest.update(name.encode())


def drawing_on() -> None:
    """Codecs draw on where they were when they were saved."""
    names = ["natural ef", "randomk ef", "linear"]
    codecs = [CODECS[name].codec for name in names]
    models = [CodedSums(codec, bps.local_size(), f"drawing {i}") for i, codec in enumerate(codecs) if codec is not None]

    def check(at: int) -> None:
        given = [contribution(rank, 0, at) for rank in range(bps.size())]
        for i, (name, model) in enumerate(zip(names, models, strict=True)):
            found = bps.push_pull(given[bps.rank()], True, f"drawing {i}", compression=CODECS[name])
            if not torch.equal(found, model(given, bps.size())):
                sys.exit(f"rank {bps.rank()}: {name}, round {at}: another sum")

    check(0)
    check(1)
    saved = bps.compression_state_dict()
    bps.shutdown()
    bps.init()
    bps.load_compression_state_dict(saved)
    check(2)


def going_on(digest: hashlib._Hash) -> None:
    """What was not sent yet, and momentum, go on: after a failure from the last commit, after all ranks have come back
    for another reason, and from what was saved. The sums are those of a run in which nothing happens."""
    drawing_on()
    names = ["int8 ef", "onebit ef", "topk of 2 bits", "thc wide"]
    codecs = [CODECS[name].codec for name in names]
    expected = [CodedSums(codec, bps.local_size()) for codec in codecs if codec is not None]
    given = [[[contribution(r, 0, at) for r in range(bps.size())] for at in range(9)] for _ in names]
    due = [[model(given[i][at], bps.size()) for at in range(9)] for i, model in enumerate(expected)]
    kept = [f"going on {name}" for name in names]
    left = {3, 5}  # steps after which something happens

    @bps.elastic.run
    def train(state) -> None:
        while state.step < 7:
            for i, name in enumerate(names):
                mine = given[i][state.step][bps.rank()]
                found = bps.push_pull(mine, True, f"going on {name}", compression=CODECS[name])
                if not torch.equal(found, due[i][state.step]):
                    sys.exit(f"rank {bps.rank()}: {name}, round {state.step}: another sum")
            state.step += 1
            if state.step == 2:
                state.commit()
            if state.step == 3 and 3 in left:
                left.discard(3)
                bps.push_pull(torch.ones(2 + bps.rank()), name="disagree")  # all ranks go back to step 2
            if state.step == 5 and 5 in left:
                left.discard(5)
                state.on_hosts_updated(1)
                state.check_host_updates()  # all ranks go on with step 5

    torch.manual_seed(1)
    train(bps.elastic.TorchState(step=0))
    assert not left
    saved = bps.compression_state_dict()
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    bps.shutdown()
    bps.init()
    is_first = bps.local_rank() == 0
    load_of_machine(bps.allgather_object(saved, name="saved"))  # as RunState does
    assert {*kept} <= bps.compression_state_dict()["tensors"].keys()
    bps.load_compression_state_dict({**saved, "tensors": {}})
    assert not bps.compression_state_dict()["tensors"]
    assert {name for name in saved["tensors"] if "going on" in name} == (set(kept) if is_first else set())
    bps.load_compression_state_dict(torch.load(file, weights_only=True))
    for at in (7, 8):
        for i, name in enumerate(names):
            found = bps.push_pull(given[i][at][bps.rank()], True, f"going on {name}", compression=CODECS[name])
            if not torch.equal(found, due[i][at]):
                sys.exit(f"rank {bps.rank()}: {name}, round {at}, from what was saved: another sum")
    for wrong, text in (({"machine": 7}, "it is of machine 7"), ({"machines": 9}, "in a job of 9 machines")):
        said = ""
        try:
            bps.load_compression_state_dict({**saved, **wrong})
        except bps.UsageError as error:
            said = str(error)
        assert text in said, said
    digest.update(b"went on")


#: What a hosted optimizer gets, beside hosted="machine".
HOSTED: dict[str, dict[str, object]] = {
    "int8": {},
    "int8 ef": {"hosted": "sharded"},
    "float8": {"hosted": "sharded", "step_in_backward": True},
    "onebit": {"hosted": "sharded", "delayed_update_after": 100},
    "randomk ef": {"hosted": "sharded"},
    "natural ef": {"hosted": "sharded"},
    "topk ef": {},
    "thc wide": {"step_in_backward": True},
    "onebit ef": {"delayed_update_after": 100},
}


def hosted(digest: hashlib._Hash) -> None:
    """The services step with the sums that ranks get otherwise: the same weights, bit for bit, as in one process."""
    for name, how in HOSTED.items():
        nets, codec = [network(), network()], CODECS[name].codec
        assert codec is not None
        plain, own = (torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9) for net in nets)
        named = [(f"hosted {name} {key}", parameter) for key, parameter in nets[1].named_parameters()]
        optimizer = bps.DistributedOptimizer(own, named, CODECS[name], **{"hosted": "machine", **how})
        models = [CodedSums(codec, bps.local_size(), f"Gradient.{key}") for key, _ in named]
        for step in range(2 * ROUNDS):
            given = [gradients(nets[0], rank, step) for rank in range(bps.size())]
            for i, (parameter, model) in enumerate(zip(nets[0].parameters(), models, strict=True)):
                parameter.grad = model([each[i] for each in given], bps.size())
            plain.step()
            gradients(nets[1], bps.rank(), step)
            optimizer.step()
            for mine, theirs in zip(*(net.parameters() for net in nets), strict=True):
                if not torch.equal(mine, theirs):
                    sys.exit(
                        f"rank {bps.rank()}: hosted with {name}, step {step} differs by {(mine - theirs).abs().max()}"
                    )
                digest.update(mine.detach().numpy().tobytes())


#: How gradients come to be summed, with what the optimizer gets for it.
FRONT_ENDS: dict[str, dict[str, object]] = {
    "optimizer": {},
    "cross": {},
    "ddp": {},
    "hosted": {"hosted": "machine"},
    "sharded": {"hosted": "sharded"},
    "passes": {"backward_passes_per_step": 2},
}


def weights_of(kind: str, fails: bool) -> torch.Tensor:
    """After 8 steps, a commit in each second one. ``fails``: ranks go back from step 5."""
    compression = C.with_momentum(CODECS["int8 ef"], 0.5)
    net = network()
    model: torch.nn.Module = net
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    if kind == "ddp":
        model = bps.DistributedDataParallel(net, compression=compression)
    else:
        named = [(f"{kind} {fails} {key}", parameter) for key, parameter in net.named_parameters()]
        optimizer = bps.DistributedOptimizer(optimizer, named, compression, **FRONT_ENDS[kind])
    if kind == "cross":
        optimizer = bps.CrossBarrier(net, optimizer)
    left = {5} if fails else set()

    @bps.elastic.run
    def train(state) -> None:
        while state.step < 8:
            for backward in range(2 if kind == "passes" else 1):
                generator = torch.Generator().manual_seed(1000 * state.step + 100 * backward + bps.rank())
                model(torch.randn(4, 70, generator=generator)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
            if state.step in left:
                left.discard(state.step)
                bps.push_pull(torch.ones(2 + bps.rank()), name="disagree")

    train(bps.elastic.TorchState(net, optimizer, step=0))
    assert not left
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def failing(digest: hashlib._Hash) -> None:
    """A training with a failure ends with the bits of one without."""
    for kind in FRONT_ENDS:
        if not torch.equal(weights_of(kind, False), weights_of(kind, True)):
            sys.exit(f"rank {bps.rank()}: {kind}: a failure has changed the weights")
    digest.update(b"failed")


def joining(digest: hashlib._Hash) -> None:
    """Machines of one rank leave one after the other: those that have joined count as zeros."""
    for round_ in range(bps.rank() + 1):
        given = [contribution(rank, 0, round_) for rank in range(bps.size())]
        found = bps.push_pull(given[bps.rank()], True, "joining", compression=C.int8)
        there = given[round_:]
        assert C.int8.codec is not None
        due = CodedSums(C.int8.codec)(there, bps.size())
        if len(there) == 1:  # a server passes a lone contribution on as it is
            due = scaled(C.int8.codec.kind, there[0]).view(found.shape) / bps.size()
        if not torch.equal(found, due):
            sys.exit(f"rank {bps.rank()}: round {round_} differs by {(found - due).abs().max()}")
    bps.join()
    digest.update(b"joined")


def main() -> None:
    assert os.environ["BYTEPS_MIN_COMPRESS_BYTES"] == "0"
    bps.init()
    digest = hashlib.sha256()
    for name in sys.argv[1:] or CODECS:
        if name == "join":
            joining(digest)
        elif name == "hosted":
            hosted(digest)
        elif name == "fail":
            failing(digest)
        elif name == "go on":
            going_on(digest)
        elif name == "rules":
            by_rules(digest)
        elif os.environ.get("BYTEPS_NONFINITE") == "raise":
            not_finite(name, digest)
        else:
            sums(name, digest)
            training(name, digest)
    print(f"rank {bps.rank()} digest {digest.hexdigest()}", flush=True)
    bps.shutdown()


if __name__ == "__main__":
    main()
