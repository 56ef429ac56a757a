"""The Recorder in one process: which tensors it writes, and that it changes none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from byteps_py.cli.__main__ import main
from byteps_py.errors import UsageError
from byteps_py.tools.numerics import Float32Gradients, RankLayout, Recorder, compare
from byteps_py.tools.numerics.records import TensorRecord, read_run


class Net(nn.Module):
    """A layer that is called twice, an operation in place, and a keyword argument."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.twice, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.recompute = recompute

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        x = self.relu(self.one(x)) + shift
        if self.recompute is not None:
            x = checkpoint(self.twice, x, use_reentrant=self.recompute)
        else:
            x = self.twice(x)
        x = self.twice(x)
        return self.frozen(x) + self.twice(input=x)  # type: ignore[no-any-return]


def batches(count: int = 2) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=rng) for _ in range(count)]


def train(net: nn.Module, recorder: Recorder | None, steps: int = 2) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD([each for each in net.parameters() if each.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        for batch in batches():
            net(batch, shift=0.1).square().sum().backward()
        if recorder is not None:
            recorder.reduced_gradients()
        optimizer.step()
        if recorder is not None:
            recorder.step_done()
    return [parameter.detach().clone() for parameter in net.parameters()]


def recorded(folder: Path, net: nn.Module, **options: str) -> list[TensorRecord]:
    with Recorder(folder, **options) as recorder:  # type: ignore[arg-type]
        recorder.attach(net)
        train(net, recorder)
    return list(read_run(folder)[0].records)


def test_recorded_runs_have_the_bits_of_others(tmp_path: Path) -> None:
    net = Net()
    with Recorder(tmp_path) as recorder:
        recorder.attach(net)
        with_records = train(net, recorder)
    expected = train(Net(), None)
    assert all(torch.equal(one, other) for one, other in zip(with_records, expected, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_every_tensor_is_there_once_for_each_call(tmp_path: Path) -> None:
    records = recorded(tmp_path, Net())
    first = [each for each in records if (each.step, each.micro_batch) == (0, 1)]
    names = [f"{each.phase} {each.module} {each.tensor} {each.occurrence}" for each in first]
    assert names[:7] == [
        "forward  input 0",
        "forward one output 0",
        "forward relu output 0",
        "forward twice output 0",
        "forward twice output 1",
        "forward frozen output 0",
        "forward twice output 2",
    ]
    assert sorted(name for name in names if name.startswith("backward")) == [
        "backward  grad_output 0",
        "backward frozen grad_input 0",
        "backward frozen grad_output 0",
        "backward one grad_output 0",
        # not the gradient of what relu overwrites
        "backward relu grad_output 0",
        *(f"backward twice grad_{side} {call}" for side in ("input", "output") for call in range(3)),
    ]
    assert sorted(name for name in names if name.startswith("accumulation")) == [
        f"accumulation {module} {tensor} 0" for module in ("one", "twice") for tensor in ("bias", "weight")
    ]
    of_step = [
        (each.phase, each.module, each.tensor) for each in records if each.step == 1 and each.micro_batch is None
    ]
    trained = [(module, tensor) for module in ("one", "twice") for tensor in ("weight", "bias")]
    everything = [*trained, ("frozen", "weight"), ("frozen", "bias")]
    assert of_step == [*(("reduction", *name) for name in trained), *(("update", *name) for name in everything)]


def test_values_and_figures_are_those_of_the_tensors(tmp_path: Path) -> None:
    net = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[3.0, -4.0]]))
    with Recorder(tmp_path) as recorder:
        recorder.attach(net)
        net(torch.tensor([[1.0, 2.0]])).backward()
        net(torch.tensor([[1.0, 2.0]])).backward()
        recorder.record("loss", torch.tensor(float("nan")))
        recorder.step_done()
    (rank,) = read_run(tmp_path)
    found = {(each.phase, each.module, each.tensor, each.micro_batch): each for each in rank.records}
    weight = found["update", "", "weight", None]
    assert (weight.minimum, weight.maximum, weight.norm, weight.shape) == (-4.0, 3.0, 5.0, (1, 2))
    accumulated = found["accumulation", "", "weight", 1]
    assert rank.bytes_of(accumulated) == torch.tensor([2.0, 4.0]).numpy().tobytes()
    assert found["forward", "loss", "value", None].norm is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_that_are_computed_again_are_recorded_once(tmp_path: Path, reentrant: bool) -> None:
    plain = recorded(tmp_path / "plain", Net())
    again = recorded(tmp_path / "again", Net(reentrant))
    forward, backward = (
        [
            sorted(
                f"{each.step} {each.micro_batch} {each.module} {each.tensor}" for each in some if each.phase == phase
            )
            for some in (plain, again)
        ]
        for phase in ("forward", "backward")
    )
    assert forward[0] == forward[1]
    assert backward[0] == backward[1]
    if not reentrant:
        assert compare(tmp_path / "plain", tmp_path / "again").is_equal


def test_patterns_choose_modules(tmp_path: Path) -> None:
    records = recorded(tmp_path, Net(), modules="tw*")
    assert {each.module for each in records} == {"twice"}
    assert {each.micro_batch for each in records if each.phase == "accumulation"} == {0, 1}


def test_micro_batches_have_the_numbers_of_their_pipe(tmp_path: Path) -> None:
    """Two forward passes before the first backward pass, as in a pipeline."""
    stage = nn.Linear(4, 4)
    with Recorder(tmp_path, RankLayout(0, {"pp": 0}, {"pp": 1})) as recorder:
        recorder.attach(stage, "layers.3.", micro_batches=[2, 3])
        outputs = [stage(batch) for batch in batches()]
        for output in outputs:
            output.sum().backward()
        with pytest.raises(UsageError, match="call 3 of a model in one step, but attach"):
            stage(batches()[0])
        recorder.step_done()
    records = read_run(tmp_path)[0].records
    assert [(each.phase, each.micro_batch, each.module) for each in records if each.tensor in ("output", "weight")] == [
        ("forward", 2, "layers.3"),
        ("forward", 3, "layers.3"),
        ("accumulation", 2, "layers.3"),
        ("accumulation", 3, "layers.3"),
        ("update", None, "layers.3"),
    ]


@pytest.mark.parametrize("recorder_first", [True, False])
def test_float32_buffers_are_recorded(tmp_path: Path, recorder_first: bool) -> None:
    """Whichever hooks come first."""
    net = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    with Recorder(tmp_path) as recorder:
        if recorder_first:
            recorder.attach(net)
        with Float32Gradients(net) as gradients:
            if not recorder_first:
                recorder.attach(net)
            for value in (256.0, 1.0):
                net(torch.full((1, 2), value, dtype=torch.bfloat16)).backward()
            recorder.reduced_gradients(gradients.gradients())
    (rank,) = read_run(tmp_path)
    found = [each for each in rank.records if each.phase in ("accumulation", "reduction")]
    assert [each.dtype for each in found] == ["float32"] * 3
    assert [each.maximum for each in found] == [256.0, 257.0, 257.0]


def test_a_changed_weight_is_the_first_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "one", Net())
    other = Net()
    with torch.no_grad():
        other.frozen.weight[1, 2] += 1
    recorded(tmp_path / "other", other)
    assert main(["numerics", "compare", str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    said = capsys.readouterr().out
    assert "step 0, micro-batch 0, forward, frozen output, rank 0: 3 of 12 elements differ" in said
    assert "first at [0, 1]" in said


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="give a folder that can be written"):
        Recorder(tmp_path / "file")
