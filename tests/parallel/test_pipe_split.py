"""Cutting a model into stages."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import pytest
import torch
from torch import nn

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.skips import MAIN, Connection, SkipNames, connections_of
from byteps_py.parallel.pipe.split import balanced, layers, measured_costs, split
from byteps_py.parallel.pipe.step_data import MicroBatches, cut
from byteps_py.parallel.pipe.trees import Signature, TensorFacts, decode, encode, flatten, unflatten


def model(count: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(*(nn.Linear(2, 2) for _ in range(count - 2))), nn.ReLU())


@pytest.mark.parametrize(("count", "stages"), [(30, 4), (30, 7), (5, 5), (9, 2)])
def test_no_layer_is_lost_and_names_stay(count: int, stages: int) -> None:
    whole = model(count)
    found = split(whole, stages)
    assert len(found) == stages
    assert [name for stage in found for name in layers(stage)] == list(layers(whole))
    names = {name: one for stage in found for name, one in stage.named_parameters()}
    assert all(names[name] is one for name, one in whole.named_parameters())
    assert len(names) == len(list(whole.named_parameters()))
    sizes = [sum(isinstance(layer, nn.Linear) for layer in layers(stage).values()) for stage in found]
    assert max(sizes) == -(-(count - 1) // stages)
    x = torch.randn(3, 2)
    y = x
    for stage in found:
        y = stage(y)
    assert torch.equal(y, whole(x))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([nn.Embedding(100, 2), *(nn.Linear(2, 2) for _ in range(4)), nn.Linear(2, 3)], [4, 2]),
        ([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()], [2, 2]),
        ([nn.Conv1d(2, 2, 1), nn.ReLU(), nn.Linear(2, 90), nn.ReLU()], [2, 2]),
        ([nn.ReLU(), nn.Flatten(), nn.Embedding(3, 3), nn.Identity()], [2, 2]),
        ([nn.Linear(2, 2), nn.LazyLinear(9), nn.Linear(9, 9), nn.Linear(9, 9)], [2, 2]),
    ],
    ids=["an embedding", "activations", "convolutions", "nothing to compute", "not yet known"],
)
def test_layers_cost_what_their_parameters_do(found: list[nn.Module], expected: list[int]) -> None:
    assert [len(stage) for stage in split(nn.Sequential(*found), 2)] == expected


def test_the_slowest_stage_is_as_fast_as_possible() -> None:
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(1, 9)
        stages = rng.randint(1, count)
        costs = [rng.randint(1, 9) for _ in range(count)]
        transfers = [rng.randint(0, 3) for _ in range(count)]

        every = [(0, *some) for some in itertools.combinations(range(1, count), stages - 1)]
        found = balanced(costs, stages, transfers)
        assert len(found) == stages
        assert slowest(tuple(found), costs, transfers) == min(slowest(each, costs, transfers) for each in every)


def slowest(bounds: tuple[int, ...], costs: list[int], transfers: list[int]) -> int:
    ends = [*bounds[1:], len(costs)]
    sums = [sum(costs[first:end]) for first, end in zip(bounds, ends, strict=True)]
    return max([*sums, *(2 * transfers[first - 1] for first in bounds[1:])])


def test_costs_are_measured_and_used() -> None:
    whole = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 2000), nn.Linear(2000, 8), nn.Tanh(), nn.Tanh(), nn.Tanh())
    costs = measured_costs(whole, torch.randint(0, 7, (64,)))
    assert list(costs) == list(layers(whole))
    assert all(cost > 0 for cost in costs.values())
    assert all(parameter.grad is None for parameter in whole.parameters())
    assert [len(stage) for stage in split(whole, 2, costs={"1": 5, "2": 5})] == [2, 4]
    assert [len(stage) for stage in split(whole, 3, cuts=["1", "5"])] == [1, 4, 1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"stages": 7}, "a model of 6 layers can't be cut into 7 stages"),
        ({"stages": 0}, "a model of 6 layers can't be cut into 0 stages"),
        ({"stages": 2, "costs": [1, 2]}, "costs: 2 numbers for 6 layers"),
        ({"stages": 2, "costs": {"9": 1}}, "costs: the model has no layer '9'; its layers: 0, 1.0"),
        ({"stages": 2, "cuts": ["1"]}, "the model can't be cut at '1'; its layers: 0, 1.0, 1.1"),
        ({"stages": 2, "cuts": ["0"]}, "'0' is the first layer of the model"),
        ({"stages": 3, "cuts": ["1.2", "1.1"]}, "'1.1' is the first layer of the model, or not after the cut before"),
        ({"stages": 3, "cuts": ["1.2"]}, "cuts: 1 of them make 2 stages, not 3"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text.replace("(", r"\(")):
        split(model(6), **arguments)  # type: ignore[arg-type]


def test_only_a_sequence_can_be_cut() -> None:
    with pytest.raises(UsageError, match=r"EncoderLayer can't be cut into stages: it is not an nn\.Sequential"):
        split(nn.TransformerEncoderLayer(8, 1), 2)


def test_skip_connections_join_stages() -> None:
    names = [
        SkipNames(frozenset("a")),
        SkipNames(frozenset("b")),
        SkipNames(pops=frozenset("b")),
        SkipNames(pops=frozenset("a")),
    ]
    main = [Connection(stage, stage + 1, MAIN) for stage in range(3)]
    assert connections_of(names) == [*main, Connection(0, 3, "a"), Connection(1, 2, "b")]
    inside = [SkipNames(frozenset("a"), frozenset("a")), SkipNames()]
    assert connections_of(inside) == [Connection(0, 1, MAIN)]
    for wrong in (
        [SkipNames(frozenset("a")), SkipNames()],
        [SkipNames(pops=frozenset("a")), SkipNames(frozenset("a"))],
    ):
        with pytest.raises(UsageError, match="the skip connection 'a' is stashed at stages"):
            connections_of(wrong)


class Pair(NamedTuple):
    one: torch.Tensor
    other: int


def test_a_description_is_understood_elsewhere() -> None:
    value = {
        "a": (torch.zeros(2, 3, requires_grad=True), [1, 2.5, None, True, "text"]),
        4: torch.zeros(0, dtype=torch.int8),
    }
    tensors, structure = flatten(value)
    facts = tuple(TensorFacts(one.dtype, tuple(one.shape), one.requires_grad) for one in tensors)
    assert decode(encode(Signature(structure, facts))) == Signature(structure, facts)
    for wrong in (Pair(torch.zeros(1), 3), {(1, 2): 3}, [object()]):
        with pytest.raises(UsageError, match=r"a value between stages has a (Pair|dict|object) in it"):
            encode(Signature(flatten(wrong)[1], ()))


def test_structures_are_taken_apart_and_made_again() -> None:
    x, y = torch.zeros(4, 2), torch.ones(4)
    value = {"pair": Pair(x, 3), "list": [y, (None, "text")], "same": x}
    tensors, structure = flatten(value)
    assert [id(one) for one in tensors] == [id(x), id(y), id(x)]
    again = unflatten(tensors, structure)
    assert isinstance(again["pair"], Pair)
    assert again["pair"].one is x
    assert again["list"] == [y, (None, "text")] or again["list"][0] is y
    first, second = cut(value, 2, "inputs")
    assert torch.equal(second["list"][0], y[2:])
    assert first["pair"].other == 3
    assert cut(MicroBatches([1, 2]), 2, "inputs") == [1, 2]
    with pytest.raises(UsageError, match="inputs: 2 micro-batches were given, and the pipeline has 3"):
        cut(MicroBatches([1, 2]), 3, "inputs")
    # A list of two is no more two micro-batches than a tuple, or a list of three, is.
    assert [[one.tolist() for one in piece] for piece in cut([y, y + 1], 2, "inputs")] == [[[1, 1], [2, 2]]] * 2
    for wrong in (x[:3], torch.zeros(())):
        with pytest.raises(UsageError, match=r"inputs: a tensor with .* can't be cut into 2 equal parts"):
            cut(wrong, 2, "inputs")
