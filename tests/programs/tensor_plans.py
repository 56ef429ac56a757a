"""What a tensor-parallel plan makes of fused layers, key heads and whole parameters, beside the plain model. Arguments:
names of cases. Prints "NAME: right" on each rank. All ranks are one tensor-parallel group."""

from __future__ import annotations

import copy
import shutil
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from cases import case, run
from tensor_parallel import check_gradients, close, group, ranks, refuses
from torch import nn
from torch.nn import functional

import byteps_py.torch  # noqa: F401  (the backend)
from byteps_py.parallel import checkpoint, clip_grad_norm_, tensor

WIDTH, HEADS, HEAD_DIM, TOKENS = 24, 8, 4, 8
#: Of the queries; a key head is that of several queries.
KEY_HEADS = (8, 4, 2, 1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (one.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for one in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


class Separate(nn.Module):
    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(WIDTH, HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.wk, self.wv = (nn.Linear(WIDTH, key_heads * HEAD_DIM) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wo(attend(self.wq(x), self.wk(x), self.wv(x)))


class Fused(nn.Module):
    """GPT-2's order, or Megatron-LM's: the queries, key and value of each key head together."""

    def __init__(self, key_heads: int, is_megatron: bool = False) -> None:
        super().__init__()
        self.shares = HEADS // key_heads, 1, 1
        self.is_megatron = is_megatron
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * key_heads) * HEAD_DIM)
        self.proj = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.local_heads = HEADS, key_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x)
        if self.is_megatron:
            groups = qkv.unflatten(-1, (-1, sum(self.shares), HEAD_DIM))
            q, k, v = (one.flatten(2) for one in groups.split(self.shares, 3))
        else:
            heads, key_heads = self.local_heads
            q, k, v = qkv.split([one * HEAD_DIM for one in (heads, key_heads, key_heads)], -1)
        return self.proj(attend(q, k, v))


class GateUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(WIDTH, 2 * 32, bias=False), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.RMSNorm(WIDTH), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


def beside(plain: nn.Module, plan: dict[str, tensor.Style], sequence_dim: int | None) -> nn.Module:
    """Check the output, gradients and their norm of a parallel copy of ``plain``; return it."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in plain.parameters():
            nn.init.normal_(parameter, std=0.3)
    if hasattr(plain, "norm"):
        plan = {"norm": tensor.Sequence(), **plan}
    parallel = tensor.parallelize(copy.deepcopy(plain), plan, group(), sequence_dim=sequence_dim)
    for module in parallel.modules():
        if isinstance(module, Fused):
            heads, key_heads = module.local_heads
            module.local_heads = heads // ranks(), max(1, key_heads // ranks())
    compare(plain, parallel, sequence_dim)
    return parallel


def compare(plain: nn.Module, parallel: nn.Module, sequence_dim: int | None) -> None:
    plain.zero_grad()
    parallel.zero_grad()
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64).requires_grad_()
    dist.broadcast(x.detach(), 0)
    y = x.detach().clone().requires_grad_()
    expected = plain(x)
    weights = torch.linspace(-1, 2, expected.numel(), dtype=expected.dtype).view_as(expected)
    own = y if sequence_dim is None else tensor.split_along(y, group(), sequence_dim)
    found = parallel(own)
    found = found if sequence_dim is None else tensor.collect_along(found, group(), sequence_dim)
    close(found, expected, "the output")
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    close(y.grad, x.grad, "the gradient of the input")
    check_gradients(plain, parallel)
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        norm = nn.utils.get_total_norm([one.grad for one in plain.parameters() if one.grad is not None], norm_type)
        own_norm = clip_grad_norm_(parallel, 1e9, norm_type)
        assert abs(own_norm - norm) <= 1e-12 * norm, f"norm {norm_type}: {own_norm} {norm}"


def fits(key_heads: int) -> bool:
    return key_heads % ranks() == 0 or ranks() % key_heads == 0


@case
def fused_layers() -> None:
    """Each part is cut separately; few key heads are held by several ranks."""
    for sequence_dim in (None, 1):
        for key_heads in filter(fits, KEY_HEADS):
            parts = (HEADS, key_heads, key_heads)
            plan = {"inner.qkv": tensor.Column(parts=parts), "inner.proj": tensor.Row()}
            beside(Block(Fused(key_heads)).double(), plan, sequence_dim)
        sizes = {
            "inner.qkv": tensor.Column(parts=[HEADS * HEAD_DIM, 4 * HEAD_DIM, 4 * HEAD_DIM]),
            "inner.proj": tensor.Row(),
        }
        beside(Block(Fused(4)).double(), sizes, sequence_dim)
        equal = {"inner.qkv": tensor.Column(parts=3, units=HEADS), "inner.proj": tensor.Row()}
        beside(Block(Fused(HEADS)).double(), equal, sequence_dim)
        together = {"inner.qkv": tensor.Column(parts=1, units=4), "inner.proj": tensor.Row()}
        beside(Block(Fused(4, is_megatron=True)).double(), together, sequence_dim)
        gated = {"inner.gate_up_proj": tensor.Column(parts=2), "inner.down_proj": tensor.Row()}
        beside(Block(GateUp()).double(), gated, sequence_dim)


@case
def few_key_heads() -> None:
    """Fewer key heads than ranks: each is held by several ranks, which keep the same bits."""
    for sequence_dim in (None, 1):
        for key_heads in filter(fits, KEY_HEADS):
            plan = {
                "inner": tensor.SharedInput(),
                "inner.wq": tensor.Column(units=HEADS),
                "inner.w[kv]": tensor.Column(units=key_heads),
                "inner.wo": tensor.Row(),
            }
            parallel = beside(Block(Separate(key_heads)).double(), plan, sequence_dim)
            shard = tensor.sharded_parameters(parallel)["inner.wk.weight"]
            if key_heads < ranks():
                assert shard.copies == (ranks() // key_heads,), shard
                first = dist.get_rank() // shard.copies[0] * shard.copies[0]
                gradient = parallel.get_parameter("inner.wk.weight").grad
                assert gradient is not None
                parts = [torch.empty_like(gradient) for _ in range(ranks())]
                dist.all_gather(parts, gradient)
                assert all(torch.equal(gradient, one) for one in parts[first : first + shard.copies[0]])
            del plan["inner"]
            beside(Block(Separate(key_heads)).double(), plan, sequence_dim)


@case
def plans_refused() -> None:
    n = ranks()
    for name in ("qkv", "c_attn", "query_key_value", "Wqkv", "in_proj", "gate_up_proj", "w12", "W_pack", "linear_qkv"):
        model = nn.ModuleDict({name: nn.Linear(8, 48), "o": nn.Linear(16, 8)})
        before = {key: one.clone() for key, one in model.state_dict().items()}
        for style in (tensor.Column(), tensor.Column(units=2 * n)):
            plan = {name: style, "o": tensor.Row()}
            refuses(f"{name} has the name of a fused layer", tensor.parallelize, model, plan, group())
        assert all(torch.equal(model.state_dict()[key], one) for key, one in before.items())
    block = nn.ModuleDict({"x": nn.Linear(8, 48), "o": nn.Linear(16, 8), "up": nn.Linear(8, 32)})
    block["down"] = nn.Linear(32, 8)
    plan: dict[str, tensor.Style] = {"x": tensor.Column(), "o": tensor.Row(), "up": tensor.Column()}
    plan["down"] = tensor.Row()
    refuses("x has 48 output features, but o takes 16", tensor.parallelize, block, plan, group())
    concatenated = nn.ModuleDict({"a": nn.Linear(8, 16), "b": nn.Linear(8, 16), "o": nn.Linear(32, 8)})
    plan = {"[ab]": tensor.Column(), "o": tensor.Row()}
    refuses("Row(parts=…)", tensor.parallelize, concatenated, plan, group())
    qkv = nn.ModuleDict({"qkv": nn.Linear(8, 48)})
    for words, style in (
        ("are no 7 equal blocks", tensor.Column(parts=(3, 4))),
        ("are no 5 equal parts", tensor.Column(parts=5)),
        ("count the heads of each part", tensor.Column(parts=(4, 4, 4), units=4)),
        ("the 16 features of each part are no 5 equal units", tensor.Column(parts=3, units=5)),
        ("gathered output would", tensor.Column(parts=3, gather_output=True)),
        ("leave out units and parts", tensor.Column(parts=3, vocabulary=True)),
        (f"{n} tensor-parallel ranks do not divide 1 heads", tensor.Column(parts=3, units=1)),
    ):
        refuses(f"qkv: {words}" if "48" in words else words, tensor.parallelize, qkv, {"qkv": style}, group())
    one = Separate(1)
    plan = {"w[qkv]": tensor.Column(units=1)}
    refuses("do not divide 1 heads", tensor.parallelize, one, plan, group())


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(x)


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(ids)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 8)


class Conv1D(nn.Module):
    """As in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 24))


def hooked(register: str) -> nn.Module:
    linear = nn.Linear(8, 8)
    getattr(linear, register)(lambda *_: None)
    return linear


def with_own_forward() -> nn.Module:
    linear = nn.Linear(8, 8)
    linear.forward = lambda x: x  # type: ignore[method-assign]
    return linear


def with_parameter() -> nn.Module:
    linear = nn.Linear(8, 8)
    linear.scale = nn.Parameter(torch.ones(8))
    return linear


def with_gradient_hook() -> nn.Module:
    linear = nn.Linear(8, 8)
    linear.weight.register_hook(lambda gradient: gradient)
    return linear


@case
def decorated_refused() -> None:
    for words, layer in (
        ("Scaled, a subclass of nn.Linear", Scaled(8, 8)),
        ("ScaledEmbedding, a subclass of nn.Embedding", ScaledEmbedding(8, 8)),
        ("has parametrizations (weight)", nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
        ("has parametrizations (weight)", nn.utils.parametrizations.spectral_norm(nn.Embedding(8, 8))),
        ("hooks (forward_hooks", hooked("register_forward_hook")),
        ("hooks (forward_pre_hooks", hooked("register_forward_pre_hook")),
        ("hooks (backward_hooks", hooked("register_full_backward_hook")),
        ("has a forward() of its own", with_own_forward()),
        ("of its own (scale)", with_parameter()),
        ("has hooks of its weight", with_gradient_hook()),
        ("is a tensor_plans.Lora" if __name__ != "__main__" else "__main__.Lora", Lora()),
        ("linear.weight.copy_(conv.weight.T)", Conv1D()),
    ):
        model = nn.ModuleDict({"first": nn.Linear(8, 8), "layer": layer})
        style = tensor.Embedding() if isinstance(layer, nn.Embedding) else tensor.Column()
        refuses(words, tensor.parallelize, model, {"first": tensor.Column(), "layer": style}, group())
        assert type(model["first"]) is nn.Linear


@case
def deep_copies() -> None:
    """A copy is a model of its own on the same ranks: for averages of weights."""
    for sequence_dim in (None, 1):
        plan = {"inner": tensor.SharedInput(), "inner.w[qkv]": tensor.Column(units=HEADS), "inner.wo": tensor.Row()}
        plain = Block(Separate(HEADS)).double()
        parallel = beside(plain, plan, sequence_dim)
        other = copy.deepcopy(parallel)
        assert tensor.sharded_parameters(other) == tensor.sharded_parameters(parallel)
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
        compare(plain, other, sequence_dim)
        averaged = torch.optim.swa_utils.AveragedModel(other)
        averaged.update_parameters(other)
        compare(plain, averaged.module, sequence_dim)
    tied = nn.ModuleDict({"embedding": nn.Embedding(40, 8), "head": nn.Linear(8, 40, bias=False)})
    tied["head"].weight = tied["embedding"].weight
    tensor.parallelize(tied, {"embedding": tensor.Embedding(), "head": tensor.Column(vocabulary=True)}, group())
    twin = copy.deepcopy(tied)
    assert twin["head"].weight is twin["embedding"].weight is not tied["head"].weight


@case
def padding() -> None:
    """A model that starts on the meta device has no garbage in the padding of its vocabulary."""
    vocabulary = 40
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary))
    plan = {"0": tensor.Embedding(), "1": tensor.Column(vocabulary=True)}
    tensor.parallelize(model, plan, group())
    device = torch.get_default_device()
    model._apply(lambda one: torch.full_like(one, torch.nan, device=device))  # as to_empty() may find the memory
    shards = tensor.sharded_parameters(model)
    for name, parameter in model.named_parameters():
        assert bool((parameter[shards[name].size :] == 0).all()), name
        with torch.no_grad():
            parameter[: shards[name].size] = 1.0
    ids = torch.arange(vocabulary)
    tensor.parallel_cross_entropy(model(ids), ids, group(), vocabulary).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all()), name


@case
def losses() -> None:
    """A mean over no target, and logits that each rank has whole."""
    n, rank = ranks(), dist.get_rank()
    for vocabulary in (10, 128, 256 * n):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, vocabulary)).double()
        x, targets = torch.randn(5, 6, dtype=torch.float64), torch.arange(5)
        gathering = copy.deepcopy(model)
        tensor.parallelize(gathering, {"1": tensor.Column(vocabulary=True, gather_output=True)}, group())
        logits = gathering(x)
        for given in (logits, logits.float(), 2 * logits, functional.pad(logits, (0, 3))):
            refuses(f"all {vocabulary} logits", tensor.parallel_cross_entropy, given, targets, group(), vocabulary)
        tensor.parallelize(model, {"1": tensor.Column(vocabulary=True)}, group())
        with torch.no_grad():
            model[1].weight.zero_(), model[1].bias.zero_()
        loss = tensor.parallel_cross_entropy(model(x), targets, group(), vocabulary)
        close(loss, torch.tensor(vocabulary).double().log(), "the loss of logits of 0")
        for options in (tensor.CrossEntropyOptions(), tensor.CrossEntropyOptions(label_smoothing=0.3, z_loss=0.1)):
            columns = tensor.padded_vocabulary(vocabulary, n) // n
            own = torch.full((5, columns), 1.0 + rank, dtype=torch.float64, requires_grad=True)
            ignored = torch.full((5,), -100)
            loss = tensor.parallel_cross_entropy(own, ignored, group(), vocabulary, options=options)
            assert bool(loss.isnan())
            loss.backward()
            assert own.grad is not None
            assert bool((own.grad == 0).all()), own.grad


class Normed(nn.Module):
    """Norms of each query and key, as Qwen3 and Gemma 3 have; perhaps a temperature."""

    def __init__(self, key_heads: int = HEADS, size: int = HEAD_DIM) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(WIDTH, HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.wk, self.wv = (nn.Linear(WIDTH, key_heads * HEAD_DIM) for _ in range(2))
        self.q_norm, self.k_norm = nn.RMSNorm(size), nn.RMSNorm(size)
        self.register_parameter("temperature", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (one.unflatten(-1, (-1, HEAD_DIM)) for one in (self.wq(x), self.wk(x)))
        q, k = self.q_norm(q).flatten(2), self.k_norm(k).flatten(2)
        return self.wo(attend(q if self.temperature is None else q * self.temperature, k, self.wv(x)))


class Positioned(nn.Module):
    """A block behind learned positions, with a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.gain = nn.Parameter(torch.zeros(()))
        self.block = Block(GateUp())
        self.forgotten = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        position = self.position
        if x.shape[1] < TOKENS:
            position = position.chunk(ranks())[dist.get_rank()]
        return self.forgotten(self.gain * self.block(x + position))


ATTENTION: dict[str, tensor.Style] = {
    "*norm": tensor.Sequence(),
    "inner.wq": tensor.Column(units=HEADS),
    "inner.w[kv]": tensor.Column(units=HEADS),
    "inner.wo": tensor.Row(),
}
GATED: dict[str, tensor.Style] = {"*.gate_up_proj": tensor.Column(parts=2), "*.down_proj": tensor.Row()}


@case
def whole_parameters() -> None:
    """Gradients of whole parameters are summed where each rank uses them on its own heads or tokens."""
    for sequence_dim in (None, 1):
        for shared in ({}, {"inner": tensor.SharedInput()}):
            beside(Block(Normed()).double(), {**ATTENTION, **shared}, sequence_dim)
        unnamed = {key: style for key, style in ATTENTION.items() if key != "*norm"}
        beside(Block(Normed()).double(), {**unnamed, "inner": tensor.SharedInput()}, sequence_dim)
        one_key = {key: style for key, style in ATTENTION.items() if key != "inner.w[kv]"}
        beside(Block(Normed(1)).double(), {**one_key, "inner": tensor.SharedInput()}, sequence_dim)
        beside(Block(Normed(1)).double(), {**ATTENTION, "inner.w[kv]": tensor.Column(units=1)}, sequence_dim)
        warm = Block(Normed())
        warm.inner.temperature = nn.Parameter(torch.zeros(1))
        named = {**ATTENTION, "inner.temperature": tensor.Replicated(sum_gradients=True)}
        beside(warm.double(), named, sequence_dim)
        positioned = {**GATED, "*": tensor.Sequence()}
        if sequence_dim is None:
            positioned = {**GATED, "block.norm": tensor.Sequence()}
        beside(Positioned().double(), positioned, sequence_dim)


@case
def uncovered_refused() -> None:
    """Before anything changes."""
    for name in ("position", "gain", "forgotten.weight"):
        plan: dict[str, tensor.Style] = {
            **GATED,
            "block.norm": tensor.Sequence(),
            "position": tensor.Sequence(),
            "gain": tensor.Sequence(),
            "forgotten": tensor.Sequence(),
        }
        del plan[name.partition(".")[0]]
        model = Positioned()
        refuses(f"{name} has no style", tensor.parallelize, model, plan, group(), sequence_dim=1)
        assert type(model.block.inner.get_submodule("gate_up_proj")) is nn.Linear
        assert type(model.forgotten) is nn.LayerNorm
    for words, model, plan in (
        ("inner.q_norm.weight is for all heads", Block(Normed(size=WIDTH)), {**ATTENTION, "norm": tensor.Sequence()}),
        ("inner.wk.weight stays whole", Block(Normed(1)), {"inner.wq": tensor.Column(units=HEADS)}),
        ("inner.scale stays whole", Block(Normed()), ATTENTION),
        ("a ParameterList has no forward()", Block(Normed()), {**ATTENTION, "*": tensor.Replicated(True)}),
    ):
        inner = model.get_submodule("inner")
        if "for all heads" in words:
            inner.wq = nn.Linear(WIDTH, WIDTH)
            inner.wo = nn.Linear(WIDTH, WIDTH)
        if "scale" in words:
            inner.scale = nn.Parameter(torch.ones(1))
        if "ParameterList" in words:
            inner.more = nn.ParameterList([nn.Parameter(torch.ones(3))])
        if "wk" in words:
            plan["inner.wo"] = tensor.Row()
        for sequence_dim in (None, 1) if "for all heads" in words else (None,):
            refuses(words, tensor.parallelize, model, plan, group(), sequence_dim=sequence_dim)
    batch = nn.ModuleDict({"norm": nn.BatchNorm1d(8)})
    refuses("over many tokens", tensor.parallelize, batch, {"norm": tensor.Sequence()}, group(), sequence_dim=1)
    halves = {"inner.wq": tensor.Column(units=HEADS), "inner.w[kv]": tensor.Column(), "inner.wo": tensor.Row()}
    refuses("Column(units=1)", tensor.parallelize, Block(Separate(1)), halves, group())
    scaled = nn.ModuleDict({"head": nn.Linear(8, 40)})
    scaled.scale = nn.Parameter(torch.ones(()))
    head = {"head": tensor.Column(vocabulary=True)}
    refuses("scale stays whole on each rank", tensor.parallelize, scaled, head, group())
    nested = nn.ModuleDict({"outer": Block(GateUp())})
    plan = {**GATED, "outer": tensor.SharedInput(), "outer.inner": tensor.SharedInput()}
    refuses("would be summed twice", tensor.parallelize, nested, plan, group())


class Residual(nn.Module):
    """Its input goes to its output, too."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        inner = self.down(functional.gelu(self.up(functional.dropout(x, 0.5, self.how == "dropout"))))
        match self.how:
            case "sum":
                return x + inner
            case "gate":
                return [inner * torch.sigmoid(self.norm(x).float()).to(inner)]
            case "itself":
                return inner, x
            case "mean":
                return {"output": inner - x.mean(-1, keepdim=True).expand_as(inner)}
            case _:
                return inner


@case
def shared_inputs_used_elsewhere() -> None:
    """Their gradients would be summed over the ranks."""
    plan = {"0": tensor.SharedInput(), "0.up": tensor.Column(), "0.down": tensor.Row()}
    gate = {**plan, "0.norm": tensor.Replicated(sum_gradients=False)}
    for how, word in (("sum", "Add"), ("gate", "NativeLayerNorm"), ("itself", "the output itself"), ("mean", "Mean")):
        x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
        model = tensor.parallelize(nn.Sequential(Residual(how)), gate, group())
        with torch.no_grad():
            model(x)  # has no gradients
        model(x.detach())  # its input has none
        refuses(
            f"0 is in the plan as SharedInput, but its input also reaches its output beside its layers (by {word}",
            model,
            x,
        )
    for how in ("dropout", "none"):
        model = tensor.parallelize(nn.Sequential(Residual(how)), gate, group())
        for _ in range(2):
            model(torch.randn(2, TOKENS, WIDTH, requires_grad=True)).sum().backward()


class Flat(nn.Module):
    """All layers in one module, some of them whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.position = nn.Embedding(TOKENS, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q_norm, self.last = nn.LayerNorm(HEAD_DIM), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.position(torch.arange(x.shape[1]))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        h = self.norm(x)
        q = self.q_norm(self.wq(h).unflatten(-1, (-1, HEAD_DIM))).flatten(2)
        x = x + self.wo(attend(q, self.wk(h), self.wv(h)))
        return x + self.down(functional.gelu(self.up(self.last(x))))


@case
def whole_beside_cut() -> None:
    """Without sequence parallelism, layers that all ranks use alike may stay unnamed."""
    heads = WIDTH // HEAD_DIM
    if heads % ranks() == 0:
        columns = {
            "w[qkv]": tensor.Column(units=heads),
            "wo": tensor.Row(),
            "up": tensor.Column(),
            "down": tensor.Row(),
        }
        beside(Flat().double(), columns, None)
    sequential = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 4), nn.LayerNorm(4))
    sequential.insert(0, nn.Linear(WIDTH, 4))
    beside(sequential.double(), {"2": tensor.Column(), "4": tensor.Row()}, None)
    for sequence_dim in (None, 1):  # in two calls
        plain = Block(GateUp()).double()
        twice = copy.deepcopy(plain)
        if sequence_dim is not None:
            tensor.sequence_parallel(twice.norm, group())
        for plan in (GATED, {"norm": tensor.Sequence()}):
            tensor.parallelize(twice, plan, group(), sequence_dim=sequence_dim)
        compare(plain, twice, sequence_dim)
    shared = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))] * 2)
    beside(shared.double(), {"0.0": tensor.Column(), "0.2": tensor.Row()}, None)
    encoder = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True, dropout=0.0).double()
    parallel = beside(encoder, {"linear1": tensor.Column(), "linear2": tensor.Row()}, None)
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        close(parallel.eval()(x), encoder.eval()(x), "the output of an evaluation")


@case
def checkpoints() -> None:
    """Fused layers and copied key heads lie in a checkpoint as in the whole model."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    assert path[0] is not None
    for number, key_heads in enumerate(filter(fits, KEY_HEADS)):
        plain = Block(Fused(key_heads)).double()
        plan = {"inner.qkv": tensor.Column(parts=(HEADS, key_heads, key_heads)), "inner.proj": tensor.Row()}
        parallel = beside(plain, plan, None)
        checkpoint.save(parallel, f"{path[0]}/{number}")
        other = Block(Fused(key_heads)).double()
        checkpoint.load(other, f"{path[0]}/{number}")
        for name, parameter in other.named_parameters():
            assert torch.equal(parameter, plain.get_parameter(name)), name
        checkpoint.save(plain, f"{path[0]}/{number}-plain")
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
        checkpoint.load(parallel, f"{path[0]}/{number}-plain")
        compare(plain, parallel, None)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path[0])


if __name__ == "__main__":
    run(sys.argv[1:], is_freed=True)
