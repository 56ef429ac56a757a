"""restore() and shadow=True on one rank: what comes back from servers, and what is refused. Servers are doubles."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import byteps_py as bps
from byteps_py.errors import (
    BytePSError,
    CommunicationError,
    GradientOrderError,
    ProtocolError,
    RendezvousError,
    UsageError,
)
from byteps_py.kernels.update_rules import Decay, Method, StepKind, UpdateRule
from byteps_py.shadow import Restorable, RestorablePartition, RestorableRecord, ServerDescription, latest_step
from byteps_py.shadow.record import Attachment, StoredBuffer, read_common
from byteps_py.tensors import DType
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.gradients.hosted.replication import (
    CommonRecord,
    ModelBuffers,
    ShadowedSteps,
    ShadowedTensor,
    checksum_of,
    tensors_of,
)
from byteps_py.torch.gradients.whole_state import held_state
from byteps_py.wire.data_link import (
    MAX_ATTACHED_BYTES,
    HeldPartition,
    HeldRun,
    ShadowDescription,
    ShadowPartition,
    ShadowRecord,
)

ADAMW = StepKind(UpdateRule(Method.ADAM, Decay.DECOUPLED), DType.FLOAT32, DType.FLOAT32)
SGD = StepKind(UpdateRule(Method.SGD), DType.FLOAT32, DType.FLOAT32)
STEP = 7
#: Elements 0 to 5 of the tensor are the weight, 6 and 7 the bias. One server has the first five, another the rest.
CUTS = ((0, 5), (5, 8))
STATES = torch.arange(24.0).view(3, 8) / 8  # the master and two moments


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


class Servers:
    """Stands for a ShadowReader, and the servers that it reads."""

    def __init__(self) -> None:
        self.common: dict[str, Any] = {
            "parts": [["g", 8, STEP]],
            "params": {
                "linear.weight": ["g", 0, [2, 3], "torch.float32"],
                "linear.bias": ["g", 6, [2], "torch.float32"],
            },
            "kinds": {"g": ["master_param", "exp_avg", "exp_avg_sq"]},
            "steps": {"g": [6, 4]},
            "groups": [{"lr": 0.25, "betas": [0.5, 0.75]}],
        }
        mean = StoredBuffer("torch.float32", (2,), torch.tensor([1.0, 2.0]).numpy().tobytes())
        self.extra = Attachment(pickle.dumps({"batch": 3}), {"mean": mean}).pack()
        self.cuts: tuple[tuple[int, int], ...] = CUTS
        self.kind = ADAMW
        self.error: BytePSError | None = None
        self.closed = 0
        self.asked: list[tuple[str, range]] = []
        self.gone: set[str] = set()

    def describe(self, hold_s: float = 0.0) -> list[ServerDescription]:
        if self.error is not None:
            raise self.error
        common = json.dumps(self.common).encode()
        record = ShadowRecord(run=1, step=STEP, rank=0, size=1, attached_bytes=len(self.extra), common=common)
        found = []
        for index, (first, end) in enumerate(self.cuts):
            part = ShadowPartition(run=1, name="g", first=first, count=end - first, step_kind=self.kind.code, step=STEP)
            run = HeldRun(1, STEP, partitions=(HeldPartition(5, index, part),), records=(record,))
            found.append(ServerDescription(f"server {index}", ShadowDescription((run,))))
        return found

    def read_into(self, part: RestorablePartition, state: int, elements: range, view: memoryview) -> None:
        self.asked.append((part.server, elements))
        view[:] = STATES[state, elements.start : elements.stop].numpy().tobytes()

    def read_attached(self, record: RestorableRecord) -> bytearray:
        if record.server in self.gone:
            raise CommunicationError(f"the server at {record.server} has ended")
        return bytearray(self.extra)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def servers() -> Iterator[Servers]:
    bps.init()
    contexts.current().session.has_shadow_servers = True
    yield Servers()
    bps.shutdown()


def shadowed(model: torch.nn.Module, servers: Servers | None = None, **options: Any) -> Any:
    kept = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = bps.DistributedOptimizer(kept, model.named_parameters(), **{"shadow": True, **options})
    if servers is not None:
        optimizer._stepper.shadow.open_reader = lambda settings: servers
    return optimizer


def test_everything_comes_back(servers: Servers) -> None:
    model = Model()
    optimizer = shadowed(model, servers)
    assert bps.restore(model, optimizer) == STEP
    assert torch.equal(model.linear.weight, STATES[0, :6].view(2, 3))
    assert torch.equal(model.linear.bias, STATES[0, 6:])
    assert torch.equal(model.mean, torch.tensor([1.0, 2.0]))
    assert optimizer.shadow_extra == {"batch": 3}
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.25, (0.5, 0.75), 1e-8)
    assert servers.asked == [("server 0", range(5)), ("server 1", range(5, 6)), ("server 1", range(6, 8))]
    assert optimizer.shadow_step == 0
    assert servers.closed == 0  # the moments are read with the next step
    states = optimizer.state_dict()["state"]
    assert [float(states[place]["step"]) for place in (0, 1)] == [6.0, 4.0]
    for number, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        assert torch.equal(states[0][name], STATES[number, :6].view(2, 3))
        assert torch.equal(states[1][name], STATES[number, 6:])
    assert "master_param" not in states[0]  # it is the parameter
    optimizer._stepper.shadow.taken_over()
    assert servers.closed == 1


def test_a_parameter_that_has_made_no_step_stays_as_it_is(servers: Servers) -> None:
    servers.common["steps"]["g"][1] = 0
    model = Model()
    before = model.linear.bias.detach().clone()
    optimizer = shadowed(model, servers)
    bps.restore(model, optimizer)
    assert torch.equal(model.linear.bias, before)
    assert set(optimizer.state_dict()["state"]) == {0}


def test_calls_of_step_that_made_none_count(servers: Servers) -> None:
    """A GradScaler has skipped two steps, whose batches are used up."""
    servers.common["calls"] = STEP + 2
    model = Model()
    optimizer = shadowed(model, servers)
    assert bps.restore(model, optimizer) == STEP + 2
    shadow = optimizer._stepper.shadow
    assert (shadow.step, shadow.calls) == (STEP, STEP + 2)


def test_a_step_that_a_scaler_skips_counts_as_a_call(servers: Servers) -> None:
    model = Model()
    optimizer = shadowed(model, servers)
    optimizer._stepper.shadow.start = lambda context: None
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for scale in (1.0, float("inf"), 1.0):
        scaler.scale(model.linear(torch.ones(1, 3)).sum() * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    shadow = optimizer._stepper.shadow
    assert (shadow.step, shadow.calls) == (2, 3)


def test_a_hosted_optimizer_s_advice_is_what_it_has(servers: Servers) -> None:
    model = Model()
    optimizer = shadowed(model, shadow=False, hosted=True)
    model.linear(torch.ones(1, 3)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(GradientOrderError, match=r"optimizer\.clip_grad_norm_.* scaler\.unscale_") as caught:
        optimizer.step()
    assert "synchronize" not in str(caught.value)


def test_nothing_is_restored_where_nothing_is_held(servers: Servers) -> None:
    servers.cuts = ()
    model = Model()
    assert bps.restore(model, shadowed(model, servers)) is None
    assert servers.closed == 1


def another_name(servers: Servers) -> None:
    servers.common["params"]["conv"] = servers.common["params"].pop("linear.bias")


def another_shape(servers: Servers) -> None:
    servers.common["params"]["linear.weight"][2] = [3, 2]


def a_missing_part(servers: Servers) -> None:
    servers.cuts = CUTS[:1]


def a_server_that_has_ended(servers: Servers) -> None:
    servers.gone.add("server 1")  # it was described last


def no_scheduler(servers: Servers) -> None:
    servers.error = RendezvousError("no scheduler answers")


@pytest.mark.parametrize(
    ("break_it", "error", "text"),
    [
        (another_name, UsageError, r"another model: parameter 'conv' of shape \[2\] .* does not have it"),
        (another_shape, UsageError, r"'linear.weight' of shape \[3, 2\] .* has it with shape \[2, 3\]"),
        (a_missing_part, CommunicationError, r"of no step all of them: step 7: elements 5 to 8 of 'g' are missing"),
        (a_server_that_has_ended, CommunicationError, "the server at server 1 has ended"),
        (no_scheduler, RendezvousError, "no scheduler answers"),
    ],
)
def test_what_can_not_be_restored_is_named(
    servers: Servers, break_it: Callable[[Servers], None], error: type[Exception], text: str
) -> None:
    break_it(servers)
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=text):
        bps.restore(model, shadowed(model, servers))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert servers.closed == 1


def test_restore_is_for_shadowed_optimizers_of_the_model(servers: Servers) -> None:
    model = Model()
    with pytest.raises(UsageError, match="shadow=True"):
        bps.restore(model, shadowed(Model(), shadow=False, hosted=True))
    with pytest.raises(UsageError, match=r"'linear\.weight' of the optimizer is not one of the model's"):
        bps.restore(model, shadowed(Model()))


def test_a_second_optimizer_is_not_shadowed(servers: Servers) -> None:
    first, model = shadowed(Model()), Model()
    first._stepper.shadow.start(contexts.current())  # as its first step does
    second = shadowed(model)
    model.linear(torch.ones(1, 3)).sum().backward()
    with pytest.raises(UsageError, match=r"another optimizer of this job is shadowed already.*in param_groups"):
        second.step()


def test_what_does_not_go_together_is_refused(servers: Servers) -> None:
    model = Model()
    with pytest.raises(UsageError, match="delayed_update_after does not go together with shadow=True"):
        shadowed(model, delayed_update_after=3)
    with pytest.raises(UsageError, match=r"num_groups or groups \(shadow=True or BYTEPS_SHADOW=1 makes it hosted\)"):
        shadowed(model, num_groups=2)
    with pytest.raises(UsageError, match="shadow_extra belongs to DistributedOptimizer"):
        shadowed(model, shadow=False, hosted=True).shadow_extra = 1
    contexts.current().session.has_shadow_servers = False
    with pytest.raises(UsageError, match="one GPU machine and no CPU machine"):
        shadowed(Model())


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (threading.Lock(), "can't be pickled"),
        (bytes(MAX_ATTACHED_BYTES), r"optimizer\.shadow_extra has 268\.4 MB, and 256 MiB are the most.* not data"),
    ],
    ids=["lock", "large"],
)
def test_what_can_not_be_attached_is_refused_before_the_step(extra: object, text: str) -> None:
    steps = ShadowedSteps("name")
    steps.extra = extra
    for check in (steps.check_extra, steps.prepare_record):
        with pytest.raises(UsageError, match=text):
            check()


def test_a_step_is_durable_if_no_later_record_was_refused() -> None:
    """Ranks that hold step 5 may lack step 3, whose record was refused: 4 says nothing of it."""
    steps = ShadowedSteps("name")
    for held, refused, durable in ((2, 0, 2), (3, 3, 2), (3, 4, 2), (4, 4, 2), (5, 4, 5), (4, 0, 5)):
        steps.agree((-held, -1.0, refused))
        assert steps.known == durable


class Masked(Model):
    """As nanoGPT: a large buffer that never changes."""

    def __init__(self, size: int = 1024) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(size, size).tril())


def test_a_large_buffer_that_does_not_change_is_not_sent() -> None:
    model = Masked()
    steps = ShadowedSteps("name")
    steps.buffers = ModelBuffers(model)
    steps.prepare_record()
    attached = Attachment.unpack(steps._packed)
    assert (set(attached.buffers), set(attached.constants)) == ({"mean"}, {"mask"})
    ModelBuffers(Masked()).check(attached.constants)
    with pytest.raises(UsageError, match="buffer 'mask' is not the one that the job began with"):
        ModelBuffers(Masked(1025)).check(attached.constants)
    with pytest.raises(UsageError, match="buffer 'mask' is not"):
        ModelBuffers(Model()).check(attached.constants)


@pytest.mark.parametrize("way", ["in place", "data", "another tensor"])
def test_a_large_buffer_that_changes_is_named(way: str) -> None:
    model = Masked()
    steps = ShadowedSteps("name")
    steps.buffers = ModelBuffers(model)
    if way == "in place":
        model.mask[5, 5] = 2
    elif way == "data":
        model.mask.data[5, 5] = 2
    else:
        model.mask = model.mask * 2
    steps.prepare_record()
    assert torch.equal(tensors_of(Attachment.unpack(steps._packed).buffers)["mask"], model.mask)
    assert steps.buffers.sizes()["mask"] == 4 << 20


class Enormous(Model):
    """A buffer beyond the limit, without memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(1).expand(70 << 20))


def test_buffers_that_are_too_much_are_named(servers: Servers) -> None:
    """As soon as they are known, before anything is read; at the step, if a large one changes that did not."""
    text = (
        r"have 293\.6 MB, and 256 MiB are the most: .* 'ema' with 293\.6 MB: .* register_buffer\(…, persistent=False\)"
    )
    model = Enormous()
    steps = ShadowedSteps("name")
    steps.buffers = ModelBuffers(model, restored=["ema"])
    with pytest.raises(UsageError, match=text):
        steps.check_size()
    with pytest.raises(UsageError, match=r"optimizer\.shadow_extra has 276\.8 MB, and 256 MiB are the most"):
        shadowed(model, servers).shadow_extra = bytes(264 << 20)


def test_a_buffer_that_had_changed_before_travels_on() -> None:
    model = Masked(400)
    assert not ModelBuffers(model, restored=["mask"]).stored()[1]
    assert set(ModelBuffers(model).stored()[1]) == {"mask"}
    assert not ModelBuffers(Masked(100)).stored()[1]  # there is little to spare


def test_what_is_restored_keeps_a_large_buffer_s_digest(servers: Servers) -> None:
    mean = StoredBuffer("torch.float32", (2,), torch.tensor([1.0, 2.0]).numpy().tobytes())
    servers.extra = Attachment(b"", {"mean": mean}, {"mask": checksum_of(Masked().mask)}).pack()
    with pytest.raises(UsageError, match="buffer 'mask' is not"):
        restore_other(servers)
    model = Masked()
    optimizer = shadowed(model, servers)
    assert bps.restore(model, optimizer) == STEP
    assert set(optimizer._stepper.shadow.buffers.stored()[1]) == {"mask"}


def restore_other(servers: Servers) -> None:
    model = Masked()
    model.mask[0, 0] = 5
    bps.restore(model, shadowed(model, servers))


def test_the_environment_asks_for_a_shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTEPS_SHADOW", "1")
    bps.init()
    contexts.current().session.has_shadow_servers = True
    try:
        assert shadowed(Model(), shadow=None).shadow_extra is None
        assert not hasattr(shadowed(Model(), shadow=False), "shadow_extra")
    finally:
        bps.shutdown()


def test_steps_of_parameters_without_states_come_back(servers: Servers) -> None:
    """A later record says of a parameter with 0 steps that it is as the model's constructor has made it."""
    servers.kind = SGD
    servers.common["kinds"] = {"g": ["master_param"]}
    model = Model()
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), shadow=True
    )
    reader: Any = servers
    optimizer._stepper.shadow.open_reader = lambda settings: reader
    assert bps.restore(model, optimizer) == STEP
    model.linear.weight.sum().backward()  # the bias makes no step
    with pytest.raises(UsageError, match="go to another machine"):  # the record, behind the step: there is none
        optimizer.step()
    made = {
        name: steps
        for bucket, states in optimizer._stepper.states._of.items()
        for name, steps in zip(bucket.names, states.steps, strict=True)
    }
    assert made == {"linear.weight": 7, "linear.bias": 4}


def test_elements_are_read_across_parts(servers: Servers) -> None:
    reader: Any = servers
    found = latest_step(servers.describe())
    assert isinstance(found, Restorable)
    moment = held_state(reader, found, "linear.weight").tensors["exp_avg_sq"]
    assert torch.equal(moment[3:6], STATES[2, 3:6])
    assert servers.asked == [("server 0", range(3, 5)), ("server 1", range(5, 6))]
    bias = held_state(reader, found, "linear.bias").tensors["exp_avg_sq"]
    assert torch.equal(bias.to(torch.float64).read(), STATES[2, 6:8].double())
    assert bias[1:1].shape == (0,)
    assert (moment.shape, moment.dtype) == (torch.Size([2, 3]), torch.float32)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"kinds": {"g": ["master_param", "exp_avg"]}},
            r"'linear.weight' has the states \['master_param', 'exp_avg'\]",
        ),
        (
            {"params": {"linear.weight": ["g", 4, [2, 3], "torch.float32"]}},
            r"'linear.weight'.*elements 4 to 5 are miss",
        ),
    ],
    ids=["a state less", "beyond the tensor"],
)
def test_a_record_without_all_of_a_parameter_is_refused(servers: Servers, changes: dict[str, Any], text: str) -> None:
    """Memory that nobody has written would be taken for states."""
    servers.common |= changes
    found = latest_step(servers.describe())
    reader: Any = servers
    assert isinstance(found, Restorable)
    with pytest.raises(ProtocolError, match=text):
        held_state(reader, found, "linear.weight")
    assert servers.asked == []


def test_a_record_says_what_has_changed_since_the_one_before() -> None:
    model = Model()
    params = list(model.parameters())
    states = ("master_param", "exp_avg")
    tensors = [ShadowedTensor("g", ["w", "b"], params, states, [1, 1], 1)]
    group: dict[str, Any] = {"lr": 0.5, "params": params}
    record = CommonRecord()
    first = read_common(record.pack(tensors, [group], None))
    assert first["params"] == {"w": ["g", 0, [2, 3], "torch.float32", 1], "b": ["g", 6, [2], "torch.float32", 1]}
    assert (first["parts"], first["members"], first["names"]) == ([["g", 8, 1]], [[0, 1]], {})
    tensors, group["lr"] = [ShadowedTensor("g", ["w", "b"], params, states, [2, 1], 2)], 0.25
    second = read_common(record.pack(tensors, [group], model))
    assert [entry[-1] for entry in second["params"].values()] == [2, 1]
    assert (second["parts"], second["groups"]) == ([["g", 8, 2]], [{"lr": 0.25}])
    assert second["names"] == {"w": ["linear.weight"], "b": ["linear.bias"]}
    more = torch.nn.Parameter(torch.zeros(4))
    other = ShadowedTensor("h", ["x"], [more], states, [2], 2)
    third = read_common(record.pack([*tensors, other], [group, {"params": [more]}], model))
    assert (list(third["params"]), third["members"]) == (["w", "b", "x"], [[0, 1], [2]])
