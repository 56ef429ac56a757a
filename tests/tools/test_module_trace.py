"""`bps plan model`: what a model costs, found on the meta device, is what the real one has and does."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.clusters import ROOT
from support.paper_formulas import gpt_parameters, gpt_step_flops
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from byteps_py.errors import UnsupportedError, UsageError
from byteps_py.tools.plan.model_costs import ModelCosts, RepeatedBlocks
from byteps_py.tools.plan.module_trace import InputSize, load_factory, trace_model
from byteps_py.tools.plan.sizing_job import ModelShape

sys.path.insert(0, str(ROOT / "examples"))
from gpt import GPT
from llama_model import Groups, LlamaOptions, llama
from resnet import build

OPTIONS = LlamaOptions(vocabulary=320, width=128, layers=3, heads=8, kv_heads=2, feed_forward=384)
TOKENS = InputSize((2, 64), torch.int64)


def real_llama() -> nn.Module:
    return llama(OPTIONS, Groups())


def real_gpt() -> nn.Module:
    return GPT(512, 64, 128, 4, 8)


def parameters_of(model: nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())


# ---- what it finds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build_model", [real_llama, real_gpt])
def test_parameters_and_activations_are_those_of_the_real_module(build_model: Callable[[], nn.Module]) -> None:
    model, tokens = build_model(), torch.zeros(2, 64, dtype=torch.int64)
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers(), tokens)}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens)
    costs = trace_model(build_model, [TOKENS])
    assert costs.parameters == parameters_of(model)
    expected = sum(one.untyped_storage().nbytes() for key, one in kept.items() if key not in own)
    assert costs.activation_bytes == pytest.approx(expected, rel=0.01)


def test_flops_are_those_of_the_formula() -> None:
    costs = trace_model(real_gpt, [TOKENS])
    assert costs.step_flops == gpt_step_flops(2, 64, 4, 128, 512, recomputes=False)
    assert costs.parameters == pytest.approx(gpt_parameters(4, 128, 512, 64), rel=0.01)
    layer = trace_model(real_llama, [TOKENS]).layers[1]
    matrices = layer.parameters - 2 * OPTIONS.width
    assert layer.flops == 2 * 128 * matrices + 4 * 128 * 64 * OPTIONS.width


def test_convolutions_have_flops_too() -> None:
    """ResNet-50 has 25.6 million parameters and 4.09 billion multiplications for an image."""
    costs = trace_model(lambda: build("resnet50"), [InputSize((1, 3, 224, 224))])
    assert costs.parameters == 25_557_032
    assert costs.flops == pytest.approx(2 * 4.09e9, rel=0.01)
    assert not costs.uncosted


def test_blocks_are_found_in_the_structure_of_the_module() -> None:
    costs = trace_model(real_gpt, [TOKENS])
    (run,) = costs.blocks
    assert [layer.name for layer in costs.layers[run.first : run.first + run.count]] == [
        f"blocks.{number}" for number in range(4)
    ]
    assert costs.shared_parameters == 512 * 128  # the embedding is the head
    inner = nn.Transformer(64, 4, 2, 3, batch_first=True)
    found = trace_model(lambda: nn.Sequential(inner.encoder, inner.encoder.layers[0]), [InputSize((2, 8, 64))])
    assert [layer.name for layer in found.layers] == ["0.layers.0", "0.layers.1", "0.norm"]
    assert found.blocks == (RepeatedBlocks(0, 2),)


def test_parameters_belong_to_the_layer_that_uses_them() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 8)
            self.never_called = nn.Linear(4, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.used(x) * self.scale, self.never_called.weight)

    costs = trace_model(Model, [InputSize((2, 4))])
    assert [(layer.name, layer.kind, layer.parameters) for layer in costs.layers] == [
        ("used", "Linear", 20),
        ("", "Model", 4 + 8),
        ("", "parameters that the forward pass does not use", 40),
    ]


def test_a_decoder_has_the_shape_that_a_user_would_write() -> None:
    assert trace_model(real_llama, [TOKENS]).decoder_shape() == ModelShape(3, 128, 8, 2, 384, 320)
    shape = trace_model(real_gpt, [TOKENS]).decoder_shape()
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.vocabulary) == (4, 128, 8, 8, 512)
    block = GPT(512, 64, 128, 4, 8).blocks[0]
    assert shape.layer_parameters == pytest.approx(parameters_of(block), rel=0.01)


def test_a_model_that_repeats_its_keys_has_its_own_number_of_heads() -> None:
    class Layer(nn.Module):
        def __init__(self, fused: bool) -> None:
            super().__init__()
            self.fused = fused
            widths = [64 + 2 * 16] if fused else [64, 16, 16]
            self.projections = nn.ModuleList(nn.Linear(64, width, bias=False) for width in widths)
            self.up, self.down = nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [one(x) for one in self.projections]
            q, k, v = parts[0].split([64, 16, 16], -1) if self.fused else parts
            heads = [one.view(*one.shape[:2], -1, 8).transpose(1, 2) for one in (q, k, v)]
            k, v = (one.repeat_interleave(4, 1) for one in heads[1:])
            mixed = nn.functional.scaled_dot_product_attention(heads[0], k, v)
            return x + self.down(self.up(mixed.transpose(1, 2).reshape(x.shape)))

    for fused in (False, True):
        costs = trace_model(lambda: nn.Sequential(Layer(fused), Layer(fused)), [InputSize((1, 8, 64))])  # noqa: B023
        assert costs.decoder_shape().kv_heads == 2


def test_nothing_is_allocated_for_a_model_of_400_billion_parameters() -> None:
    options = LlamaOptions(128256, 16384, 126, 128, 8, 53248)
    costs = trace_model(lambda: llama(options, Groups()), [InputSize((1, 512), torch.int64)], torch.bfloat16)
    assert costs.parameters == pytest.approx(405.85e9, rel=1e-3)
    assert costs.decoder_shape().parameters == costs.parameters


# ---- cutting -------------------------------------------------------------------------------------------------------


def test_stages_are_as_even_as_any_cut_makes_them() -> None:
    costs = trace_model(real_llama, [TOKENS])
    flops = [layer.flops for layer in costs.layers]
    for stages in range(1, len(flops) + 1):
        cut = costs.cut(stages)
        assert [place for stage in cut for place in stage] == list(range(len(flops)))
        assert len(cut) == stages
        assert all(cut)
        most = max(sum(flops[stage.start : stage.stop]) for stage in cut)
        ways = itertools.combinations(range(1, len(flops)), stages - 1)
        bounds = ([0, *way, len(flops)] for way in ways)
        assert most == min(max(sum(flops[a:b]) for a, b in itertools.pairwise(bound)) for bound in bounds)
    for wrong in (0, 6):
        with pytest.raises(UsageError, match=f"{wrong} stages: this model can be cut into 1 to 5"):
            costs.cut(wrong)


# ---- what it can't find --------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer, and then what a test adds."""

    def __init__(self, after: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.inner, self.after = nn.Linear(4, 4), after

    def forward(self, x: torch.Tensor) -> object:
        return self.after(self.inner(x))


def trace(after: Callable[[torch.Tensor], object]) -> ModelCosts:
    return trace_model(lambda: nn.Sequential(Layer(after)), [InputSize((4, 4))])


def test_operators_without_a_cost_are_named_and_counted_by_their_bytes() -> None:
    costs = trace(lambda x: torch.sort(torch.linalg.inv(x) + torch.linalg.inv(x))[0])
    found = {one.kind: (one.calls, one.moved_bytes) for one in costs.uncosted}
    assert found == {"aten.linalg_inv_ex": (2, 2 * (2 * 64 + 4)), "aten.sort": (1, 2 * 64 + 128)}
    remark = list(costs.remarks())[-1]
    assert "aten.linalg_inv_ex (2 calls), aten.sort (1 call)" in remark
    assert costs.flops == 2 * 4 * 4 * 4  # of the layer


@torch.library.custom_op("byteps_py_test::without_a_size", mutates_args=())
def without_a_size(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@pytest.mark.parametrize(
    ("after", "kind", "message"),
    [
        (lambda x: x * x.sum().item(), UnsupportedError, r"layer '0' depends on values of tensors"),
        (lambda x: x if x.sum() > 0 else -x, UnsupportedError, r"layer '0' depends on values of tensors"),
        (lambda x: x[x > 0], UnsupportedError, r"layer '0' depends on values of tensors"),
        (without_a_size, UnsupportedError, r"layer '0' calls an operator that the meta device lacks: .*without_a_size"),
        (
            lambda x: x @ torch.ones(5, 5),
            UsageError,
            r"the forward pass fails in layer '0': RuntimeError: .*See whether",
        ),
        (lambda x: x + torch.ones(4, device="cpu"), UsageError, r"the forward pass fails in layer '0'"),
        (lambda x: {}["key"], UsageError, r"fails in layer '0': KeyError: 'key'\. See whether"),
    ],
)
def test_forward_passes_that_cannot_be_traced(
    after: Callable[[torch.Tensor], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        trace(after)


def test_modules_that_cannot_be_built() -> None:
    def reads_values() -> nn.Module:
        return nn.Linear(int(torch.ones(1)), 1)

    with pytest.raises(UsageError, match=r"can't be built on the meta device: .*nor load weights"):
        trace_model(reads_values, [])
    with pytest.raises(UsageError, match=r"the function returns a dict: it must return the nn\.Module"):
        trace_model(dict, [])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the model has parameters with values"):
        trace_model(nn.Linear(4, 4), [InputSize((4, 4))])
    with torch.device("meta"):
        on_meta = nn.Linear(4, 4)
    assert trace_model(on_meta, [InputSize((4, 4))]).parameters == 20
    assert trace_model(lambda: nn.Linear(4, 4, device="cpu"), [InputSize((4, 4))]).parameters == 20


def test_torch_is_as_it_was_after_an_error() -> None:
    with pytest.raises(UsageError):
        trace(lambda x: {}["key"])
    q = torch.rand(1, 1, 4, 4, device="meta")
    assert nn.functional.scaled_dot_product_attention(q, q, q).shape == q.shape
    assert trace(lambda x: x).flops == 128


def test_what_is_no_decoder_says_so() -> None:
    with pytest.raises(UsageError, match="is no decoder whose layouts can be planned: no equal blocks follow"):
        trace(lambda x: x).decoder_shape()
    with pytest.raises(UsageError, match="is no decoder whose layouts can be planned: no block calls attention"):
        trace_model(lambda: nn.Sequential(*(Layer(lambda x: x) for _ in range(3))), [InputSize((4, 4))]).decoder_shape()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model", "names no function"),
        ("no_such_module_of_mine:build", "can't be imported: ModuleNotFoundError"),
        ("no_such_file.py:build", "can't be imported: FileNotFoundError"),
        ("torch.nn:Lineal", "has no function 'Lineal'"),
        ("torch.nn:Linear(4,", "is no Python"),
    ],
)
def test_factories_that_are_not_there(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_factory(text)


def test_factories() -> None:
    for text in ("torch.nn:Identity", "torch.nn:Linear(4, 4)", f"{ROOT}/examples/resnet.py:build('resnet50')"):
        assert isinstance(load_factory(text)(), nn.Module)


@pytest.mark.parametrize("text", ["", "2x", "axb", "0x4", "2x4:strange", "2x4:nn"])
def test_inputs_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="is no input: give sizes and a type"):
        InputSize.parse(text)


def test_inputs_by_name_and_in_another_type() -> None:
    class Named(nn.Module):
        def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
            assert mask.dtype is torch.bool
            return nn.functional.relu(x.masked_fill(mask, 0))

    inputs = [InputSize.parse("2x4"), InputSize.parse("mask=2x4:bool")]
    costs = [trace_model(Named, inputs, dtype) for dtype in (None, torch.bfloat16)]
    assert [one.operators[-1].output_bytes for one in costs] == [32, 16]


def test_files_of_one_name_are_different_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.py").write_text(f"from torch import nn\n\n\ndef build():\n    return nn.Linear({number}, 1)\n")
    built = [load_factory(f"{tmp_path}/{number}/model.py:build")() for number in (1, 2)]
    assert [parameters_of(one) for one in built] == [2, 3]
