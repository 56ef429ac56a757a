"""`bps plan operators`: FlexFlow's simulation and search on operator graphs."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.clusters import ROOT

from benchmarks.operator_steps import measured_graph, simulated_s
from byteps_py.cli.__main__ import main
from byteps_py.errors import UsageError
from byteps_py.tools.plan.cluster import Cluster
from byteps_py.tools.plan.module_trace import InputSize, trace_model
from byteps_py.tools.plan.operators.operator_graph import Operator, OperatorGraph, graph_of, read_graph
from byteps_py.tools.plan.operators.strategy import (
    DeviceTopology,
    Division,
    channel_parallel,
    data_parallel,
    device_bytes,
    divisions_of,
    on_one_device,
    read_shares,
    space_size,
)
from byteps_py.tools.plan.operators.strategy_search import SearchOptions, StrategyWalk, search_strategy
from byteps_py.tools.plan.operators.timeline import BACKWARD, FORWARD, GRADIENT, StepTimeline, Task, TaskGraph

sys.path.insert(0, str(ROOT / "examples"))
from gpt import GPT
from resnet import build

#: Two machines of two devices. Without latencies, times are those that one computes by hand.
TWO_BY_TWO = DeviceTopology(Cluster(2, 2, 80, 1, 1000, 10, 1))
TWO = DeviceTopology(Cluster(1, 2, 80, 1, 1000, 10), launch_s=1e-9, latency_s=1e-9)


def random_graph(generator: random.Random, count: int = 7) -> OperatorGraph:
    """Operators with one to three inputs, of all kinds."""
    operators = []
    for number in range(count):
        inputs = generator.sample(range(number), min(number, generator.choice([1, 1, 1, 2, 3])))
        operators.append(
            Operator(
                f"operator {number}",
                *(generator.choice(sizes) for sizes in ([1, 4], [1, 4], [1, 4, 4])),
                flops=generator.choice([0, 1e9, 1e10]),
                moved_bytes=generator.choice([1e5, 1e7]),
                output_bytes=generator.choice([1e5, 4e6]),
                parameters=generator.choice([0, 10**5, 10**7]),
                mixes_attribute=generator.random() < 0.3,
                mixes_channels=generator.random() < 0.5,
                inputs=tuple(f"operator {one}" for one in sorted(inputs)),
            )
        )
    return OperatorGraph(tuple(operators))


# ---- simulation ----------------------------------------------------------------------------------------------------


def test_delta_and_full_simulation_are_equal_on_2000_random_changes() -> None:
    changes = looks = all_tasks = 0
    for seed in range(50):
        generator = random.Random(seed)
        tasks = TaskGraph(random_graph(generator), TWO_BY_TWO)
        choices = [list(divisions_of(one, 4)) for one in tasks.graph.operators]
        walk = StrategyWalk(tasks, tuple(generator.choice(each) for each in choices))
        for _ in range(40):
            number, before = generator.randrange(len(choices)), walk.timeline.looks
            walk.divide(number, generator.choice(choices[number]))
            whole = StepTimeline(tasks.tasks(walk.strategy))
            assert walk.timeline.tasks == whole.tasks, seed
            assert walk.timeline.ready_s == whole.ready_s, seed
            assert walk.timeline.end_s == whole.end_s, seed
            assert walk.timeline.makespan_s == whole.makespan_s
            changes, looks, all_tasks = changes + 1, looks + walk.timeline.looks - before, all_tasks + whole.looks
    assert changes == 2000
    assert looks < 1.1 * all_tasks


def test_a_timeline_keeps_its_rules() -> None:
    """No two tasks at once on a resource, in the order in which they are ready, and none before what it waits for."""
    generator = random.Random(0)
    tasks = TaskGraph(random_graph(generator, 12), TWO_BY_TWO)
    strategy = tuple(generator.choice(list(divisions_of(one, 4))) for one in tasks.graph.operators)
    timeline = StepTimeline(tasks.tasks(strategy))
    orders: dict[tuple[int, int], list[tuple[float, tuple[int, ...]]]] = {}
    for key, task in timeline.tasks.items():
        assert timeline.ready_s[key] == max((timeline.end_s[before] for before in task.after), default=0.0)
        orders.setdefault(task.resource, []).append((timeline.ready_s[key], key))
    for order in orders.values():
        free_s = 0.0
        for ready_s, key in sorted(order):
            free_s = max(ready_s, free_s) + timeline.tasks[key].duration_s
            assert timeline.end_s[key] == free_s


def test_a_change_touches_only_what_depends_on_it() -> None:
    """Of two branches on devices of their own, the other one is not looked at."""
    branch = [Operator("a0", 2, flops=1e9), Operator("b0", 2, flops=1e9)]
    for number in range(1, 20):
        branch += [Operator(f"{name}{number}", 2, flops=1e9, inputs=(f"{name}{number - 1}",)) for name in "ab"]
    graph = OperatorGraph(tuple(branch))
    strategy = tuple(Division(first_device="ab".index(one.name[0])) for one in graph.operators)
    walk = StrategyWalk(TaskGraph(graph, DeviceTopology(Cluster(1, 4, 80, 1, 1000, 10))), strategy)
    before = walk.timeline.looks
    walk.divide(len(graph.operators) - 1, Division(first_device=2))
    assert walk.timeline.looks - before <= len(walk.timeline.tasks) // 4 + 5  # one branch, backward


def chain(parameters: int = 0) -> OperatorGraph:
    """1 s forward each, on one device; their outputs are 10 GB."""
    first = Operator("first", 2, flops=1e12, output_bytes=10e9, parameters=parameters)
    return OperatorGraph((first, replace(first, name="second", inputs=("first",))))


def test_times_are_those_of_a_small_case_by_hand() -> None:
    graph = chain()
    tasks = TaskGraph(graph, TWO)

    def step_s(*strategy: Division) -> float:
        return StepTimeline(tasks.tasks(strategy)).makespan_s

    assert step_s(Division(), Division()) == pytest.approx(6)
    assert step_s(Division(), Division(first_device=1)) == pytest.approx(6 + 2)  # 1 s there, 1 s back
    assert step_s(Division(2), Division(2)) == pytest.approx(3)
    # The second half of the samples travels, and comes back, while nothing else is to be done there.
    assert step_s(Division(), Division(2)) == pytest.approx(1 + 0.5 + 0.5 + 1 + 0.5 + 2)


def test_gradients_of_copies_travel_around_a_ring() -> None:
    tasks = TaskGraph(chain(parameters=10**10), TWO)  # 40 GB of gradients
    timeline = StepTimeline(tasks.tasks((Division(2), Division(2))))
    sums = [key for key in timeline.tasks if key[0] == GRADIENT]
    assert len(sums) == 4
    assert timeline.makespan_s == pytest.approx(2 + 4 + 4)  # the link sums one operator's after the other's
    assert not any(key[0] == GRADIENT for key in tasks.tasks((Division(), Division())))


def test_links_between_machines_are_shared() -> None:
    graph = OperatorGraph((Operator("a", 2, flops=1e9, output_bytes=1e9), Operator("b", 2, flops=1e9, inputs=("a",))))
    tasks = TaskGraph(graph, TWO_BY_TWO).tasks((Division(2), Division(2, first_device=2)))
    links = {task.resource for task in tasks.values() if task.resource[0] != -2}
    assert links == {(-1, 0), (-1, 1)}
    near = TaskGraph(graph, TWO_BY_TWO).tasks((Division(), Division(first_device=1)))
    assert {task.resource for task in near.values() if task.resource[0] != -2} == {(0, 1), (1, 0)}


def test_what_a_part_reads() -> None:
    """Shares of the whole output, which add up to what all readers need."""
    halves, channels = Division(2), Division(1, 1, 2)
    assert read_shares(halves, halves, False, False) == ((0, 0, 0.5), (1, 1, 0.5))
    assert [share for *_, share in read_shares(halves, channels, False, False)] == [0.25] * 4
    assert [share for *_, share in read_shares(halves, channels, False, True)] == [0.5] * 4  # each needs all channels
    tokens = Division(1, 2)
    assert sum(share for *_, share in read_shares(tokens, tokens, False, False)) == 1
    assert sum(share for *_, share in read_shares(tokens, tokens, True, False)) == 2


# ---- the space, and the search -------------------------------------------------------------------------------------


def test_the_space_of_an_operator() -> None:
    found = list(divisions_of(Operator("a", 4, 1, 2), 4))
    assert len(found) == len(set(found)) == 4 + 2 * 2 + 2
    assert {each.degrees for each in found} == {(1, 1, 1), (2, 1, 1), (1, 1, 2), (4, 1, 1), (2, 1, 2)}
    assert all(0 <= each.device(part) < 4 for each in found for part in range(each.parts))
    assert str(Division(2, 1, 2)) == "2 samples x 2 channels, device 0 to 3"
    assert str(Division(first_device=3)) == "whole, device 3"


def test_memory_of_devices() -> None:
    graph = OperatorGraph((Operator("a", 2, 1, 2, output_bytes=8, parameters=10),))
    assert device_bytes(graph, (Division(2),), 2) == [164, 164]
    assert device_bytes(graph, (Division(1, 1, 2),), 2) == [84, 84]
    assert device_bytes(graph, on_one_device(graph), 2) == [168, 0]


def test_the_walk_finds_the_optimum_of_small_spaces() -> None:
    found = 0
    for seed in range(6):
        graph = random_graph(random.Random(seed), 5)
        if not 20 < space_size(graph, 2) <= 600:
            continue
        exact = search_strategy(graph, TWO, SearchOptions(exact_up_to=3000))
        walked = search_strategy(graph, TWO, SearchOptions(500, seed=seed, exact_up_to=0))
        assert exact.is_optimal
        assert exact.tried == space_size(graph, 2)
        assert not walked.is_optimal
        assert walked.step_s == exact.step_s, seed
        found += 1
    assert found >= 3


def test_large_parameters_are_divided_and_many_samples_are() -> None:
    """FlexFlow's observation: convolutions by samples, linear layers with large matrices by channels."""
    convolution = Operator("convolution", 64, 1, 1, 1e10, 1e6, 1e6, 1000)
    linear = Operator("linear", 64, 1, 4096, 1e10, 1e8, 1e6, 10**8, mixes_channels=True, inputs=("convolution",))
    graph = OperatorGraph((convolution, linear))
    found = search_strategy(graph, TWO, SearchOptions())
    assert found.strategy[0].degrees == (2, 1, 1)
    assert found.strategy[1].degrees == (1, 1, 2)
    assert found.others["channels divided"] == found.step_s
    assert all(found.step_s < (found.others[name] or 0) for name in ("data parallelism", "one device"))


def test_the_same_seed_gives_the_same_strategy() -> None:
    graph = random_graph(random.Random(3), 12)
    found = [search_strategy(graph, TWO_BY_TWO, SearchOptions(40, seed=seed)) for seed in (1, 1)]
    assert found[0] == found[1]
    assert found[0].tried > 40


def test_memory_decides() -> None:
    graph = OperatorGraph(
        tuple(Operator(f"layer {number}", 2, 1, 2, 1e9, parameters=10**9) for number in range(2))
    )  # 16 GB of states each
    tight = DeviceTopology(Cluster(1, 2, 17, 1, 1000, 10))
    found = search_strategy(graph, tight, SearchOptions())
    assert found.most_bytes <= 17e9
    assert found.others["data parallelism"] is found.others["one device"] is None
    assert found.others["channels divided"] is not None
    walked = search_strategy(graph, tight, SearchOptions(300, exact_up_to=0))
    assert walked.most_bytes <= 17e9
    with pytest.raises(UsageError, match=r"no strategy that was found fits in memory: the best one lacks 1\.0 GB"):
        search_strategy(graph, DeviceTopology(Cluster(1, 2, 15, 1, 1000, 10)), SearchOptions())


def test_well_known_strategies() -> None:
    costs = trace_model(lambda: GPT(512, 64, 128, 2, 8), [InputSize((4, 64), torch.int64)])
    graph = graph_of(costs, 4)
    by_name = dict(
        zip((one.name.rpartition(":")[0] for one in graph.operators), channel_parallel(graph, 4), strict=True)
    )
    assert by_name["blocks.0.qkv:addmm"].degrees == by_name["blocks.0.mlp.2:addmm"].degrees == (1, 1, 4)
    assert by_name["blocks.0.norm1:native_layer_norm"].degrees == (1, 4, 1)  # sequence parallelism
    assert {each.degrees for each in data_parallel(graph, 4)[2:]} == {(4, 1, 1)}


def test_large_graphs_end_early_or_are_refused() -> None:
    graph = random_graph(random.Random(3), 12)
    few = search_strategy(graph, TWO_BY_TWO, SearchOptions(1000, most_looks=2000))
    assert few.tried < 200
    chain = [Operator("0", 512)]
    chain += [Operator(str(number), 512, inputs=(str(number - 1),)) for number in range(1, 30)]
    many = DeviceTopology(Cluster(8, 8, 80, 1, 1000, 10, 1))
    with pytest.raises(
        UsageError, match=r"30 operators on 64 devices have up to 118,784 transfers, and at most 100,000"
    ):
        search_strategy(OperatorGraph(tuple(chain)), many, SearchOptions())


@pytest.mark.parametrize(("proposals", "beta"), [(0, 1.0), (1, 0.0), (1, float("inf"))])
def test_options_that_make_no_sense(proposals: int, beta: float) -> None:
    with pytest.raises(UsageError, match=r"numbers above 0 are needed"):
        SearchOptions(proposals, beta)


# ---- graphs --------------------------------------------------------------------------------------------------------


def test_the_graph_of_a_traced_model() -> None:
    costs = trace_model(lambda: GPT(512, 64, 128, 2, 8), [InputSize((4, 64), torch.int64)])
    graph = graph_of(costs, 4)
    assert sum(one.flops for one in graph.operators) == costs.flops
    assert sum(one.parameters for one in graph.operators) == costs.parameters + costs.shared_parameters
    by_name = {one.name.rpartition(":")[0]: one for one in graph.operators}
    product, norm = by_name["blocks.0.qkv:addmm"], by_name["blocks.1.norm2:native_layer_norm"]
    assert (product.samples, product.attribute, product.channels, product.mixes_channels) == (4, 64, 384, True)
    assert (norm.channels, norm.mixes_channels) == (1, True)
    attention = next(one for one in graph.operators if "attention" in one.name)
    assert (attention.samples, attention.attribute, attention.channels) == (4, 64, 8)
    assert attention.mixes_attribute
    assert not attention.mixes_channels
    assert by_name["blocks.0.mlp.0:addmm"].output_bytes == 4 * 4 * 64 * 512  # with its activation function
    assert len(graph.operators) == 5 + 9 * 2  # embeddings, their sum, norm and head; nine of a block


def test_a_step_of_measured_operators_is_three_times_their_forward_passes() -> None:
    """As a benchmark compares it with real steps."""
    cluster = Cluster(1, 1, 100, 0.1, 10, 1)
    graph = random_graph(random.Random(2), 6)
    groups = {number: [2 * number, 2 * number + 1] for number in range(6)}
    seconds = [0.01 * (place + 1) for place in range(12)]
    measured = measured_graph(graph, groups, seconds, cluster)
    step_s = simulated_s(measured, DeviceTopology(cluster, launch_s=0.0))
    assert step_s == pytest.approx(3 * sum(seconds))


def test_images_have_samples_and_channels() -> None:
    costs = trace_model(lambda: build("resnet50"), [InputSize((8, 3, 64, 64))])
    graph = graph_of(costs, 8)
    first = graph.operators[0]
    assert (first.samples, first.attribute, first.channels, first.mixes_channels) == (8, 32, 64, True)
    strategy = data_parallel(graph, 8)
    assert {each.degrees for each in strategy} == {(8, 1, 1)}
    assert max(device_bytes(graph, strategy, 8)) > 16 * costs.parameters


def test_a_graph_is_written_and_read(tmp_path: Path) -> None:
    graph = random_graph(random.Random(1))
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(graph.as_json()))
    assert read_graph(str(path)) == graph


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "has no graph: give"),
        ({"operators": []}, "the graph has no operators"),
        ({"operators": [{"name": "a"}]}, "lacks samples: a graph's operator has name, samples"),
        ({"operators": [{"name": "a", "samples": 0}]}, "a: samples=0: a whole number of at least 1"),
        ({"operators": [{"name": "a", "samples": 1, "flops": -1}]}, "a: flops=-1: a number of at least 0"),
        ({"operators": [{"name": "a", "samples": 1, "inputs": ["b"]}]}, "'a' reads 'b', which is no operator before"),
        ({"operators": [{"name": "a", "samples": 1, "inputs": "b"}]}, "names and inputs are strings"),
        ({"operators": [{"name": "a", "samples": 1}] * 2}, "two operators are called 'a'"),
    ],
)
def test_graphs_that_can_not_be(tmp_path: Path, found: object, message: str) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(found))
    with pytest.raises(UsageError, match=message):
        read_graph(str(path))


# ---- the command ---------------------------------------------------------------------------------------------------

CLUSTER = ["--cluster", "a100", "--set", "gpus_per_machine=2"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graph.json"
    traced = ["--module", "torch.nn:Sequential(Linear(64, 64), ReLU(), Linear(64, 8))", "--input", "4x64"]
    assert main(["plan", "operators", *CLUSTER, *traced, "--write-graph", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["optimal"]
    assert [each["operator"] for each in found["strategy"]] == ["0:addmm:0", "2:addmm:2"]
    assert main(["plan", "operators", *CLUSTER, "--graph", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"{1e3 * found['step_s']:,.3f} ms a step: the fastest of all strategies" in text
    assert "0:addmm:0" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--graph", "none.json"], "none.json can't be read"),
        (["--module", "torch.nn:Identity"], "--input is missing"),
        (["--module", "torch.nn:Identity", "--input", "4x4"], "the graph has no operators"),
        (
            ["--module", "torch.nn:ReLU", "--input", "4x4", "--write-graph", "/nowhere/graph.json"],
            "graph has no operators",
        ),
        (["--module", "torch.nn:Linear(4, 4)", "--input", "4x4", "--proposals", "0"], "proposals=0"),
    ],
)
def test_wrong_input(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["plan", "operators", *CLUSTER, *words]) == 2
    assert message in capsys.readouterr().err


def test_task_is_a_plain_tuple() -> None:
    task = Task((-2, 0), 1.0, ())
    assert StepTimeline({(FORWARD, 0, 0, -1, -1): task}).makespan_s == 1.0
    assert BACKWARD > FORWARD
