"""`bps plan layout`: what layouts cost, by the formulas and by the schedules themselves, and which one is chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.schedules import make
from byteps_py.parallel.pipe.simulator import simulate
from byteps_py.placement.shares import Optimum
from byteps_py.tools.plan.calibration import StepTimeModel
from byteps_py.tools.plan.cluster import KNOWN, Cluster, load_cluster, read_cluster
from byteps_py.tools.plan.layout_cost import (
    Hosted,
    JobLayout,
    PlanJob,
    gradient_sums,
    rank_memory,
    step_layout,
    step_times,
    under_way,
)
from byteps_py.tools.plan.layout_plan import SCHEDULES, LayoutPlan, options_of, plan_layouts, possible_layouts
from byteps_py.tools.plan.sizing_job import ModelShape, known_model

TINY = ModelShape(8, 1024, 16, 4, 4096, 32000)
CLUSTER = replace(KNOWN["h100"], machines=2)
JOB = PlanJob(TINY, CLUSTER, 64, 2048)
LAYOUT = JobLayout(tp=1, cp=1, pp=4, dp=4, micro_batch=1, micro_batches=16)


def times(job: PlanJob = JOB) -> StepTimeModel:
    return StepTimeModel(job.cluster.hardware, {})


def part(layout: JobLayout, name: str, job: PlanJob = JOB) -> float:
    return float(step_times(job, [layout], times(job))[name][0])


def sums(layout: JobLayout, job: PlanJob = JOB) -> float:
    """Of gradients, hidden or not."""
    rings = times(job).parts([step_layout(job, layout)])["gradients"]
    return float(gradient_sums(job, [layout], rings)[0])


# ---- time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_is_that_of_the_schedule(schedule: str) -> None:
    """In units of the time of a worker, by the simulator."""
    options = {"chunks": 2} if schedule == "interleaved" else {}
    program = make(schedule, 4, 16, **options)
    idle = simulate(program).makespan / 3 / (2 if schedule == "interleaved" else 1) - 16
    found = part(replace(LAYOUT, schedule=schedule), "pipeline bubble") / part(LAYOUT, "pipeline bubble") * 3
    assert found == pytest.approx(idle)


@pytest.mark.parametrize("schedule", ["gpipe", "dapple", "chimera", "gems"])
def test_micro_batches_under_way_are_those_of_the_schedule(schedule: str) -> None:
    held = make(schedule, 4, 16).peak_in_flight()
    assert under_way(replace(LAYOUT, schedule=schedule))[0] == max(held)


def test_the_interleaved_schedule_keeps_about_what_the_paper_says() -> None:
    """Of two chunks, each activation is half of a worker's."""
    held = make("interleaved", 4, 16, chunks=2).peak_in_flight()[0] / 2
    assert under_way(replace(LAYOUT, schedule="interleaved"))[0] == pytest.approx(held, rel=0.1)


@pytest.mark.parametrize(("machines", "servers"), [(2, 0), (2, 1), (4, 1), (4, 2), (8, 3), (8, 8), (8, 20)])
def test_servers_shorten_sums_as_the_placement_says(machines: int, servers: int) -> None:
    layout = JobLayout(tp=1, cp=1, pp=1, dp=8 * machines, micro_batch=1, micro_batches=1)
    sums = [
        part(layout, "gradients", PlanJob(TINY, replace(CLUSTER, machines=machines, servers=k), 8 * machines, 2048))
        for k in (0, servers)
    ]
    best = [Optimum(machines, min(machines, k)).time for k in (0, servers)]
    assert sums[1] / sums[0] == pytest.approx(float(best[1] / best[0]))


def test_what_each_way_to_keep_states_sends() -> None:
    whole = part(LAYOUT, "gradients")
    sent = {data: part(replace(LAYOUT, data=data), "gradients") / whole for data in ("zero1", "zero2", "zero3")}
    assert sent == pytest.approx({"zero1": 1.5, "zero2": 1.0, "zero3": 16.5})  # 2 gathers for a micro-batch


@pytest.mark.parametrize(
    ("machines", "servers", "hosted", "expected"),
    [
        (2, 1, "sharded", 1.5),  # docs/explanation/placement.md
        (2, 2, "sharded", 1.5),
        (4, 2, "sharded", 1.5),
        (4, 2, "machine", 1.4),
        (2, 2, "machine", 1),  # CPU machines add everything: nothing is sent twice
        (2, 1, "machine", 1.5),
        (2, 0, "sharded", 1.5),
        (4, 0, "sharded", 2),  # two copies
    ],
)
def test_a_shadow_costs_the_sums_that_are_sent_once_more(
    machines: int, servers: int, hosted: Hosted, expected: float
) -> None:
    """In units of M/B."""
    layout = JobLayout(1, 1, 1, 8 * machines, 1, 1, hosted=hosted, shadow=True)
    job = PlanJob(TINY, replace(CLUSTER, machines=machines, servers=servers), 8 * machines, 2048, shadow=True)
    alone = replace(job, cluster=replace(CLUSTER, machines=machines))
    ring = sums(replace(layout, hosted="machine", shadow=False), alone)
    assert sums(layout, job) / ring * 2 * (machines - 1) / machines == pytest.approx(expected)


@pytest.mark.parametrize(
    ("machines", "servers", "hosted", "expected"),
    [
        (4, 4, "sharded", 1.5),  # 1.25 with one copy, which costs no bytes; another CPU machine gets each sum once more
        (4, 4, "machine", 1.25),
        (2, 1, "sharded", 2),  # all sums to the other GPU machine
        (4, 0, "sharded", 2),  # two copies without asking
    ],
)
def test_two_copies_of_a_shadow(machines: int, servers: int, hosted: Hosted, expected: float) -> None:
    """BYTEPS_SHADOW_COPIES=2."""
    layout = JobLayout(1, 1, 1, 8 * machines, 1, 1, hosted=hosted, shadow=True)
    cluster = replace(CLUSTER, machines=machines, servers=servers)
    job = PlanJob(TINY, cluster, 8 * machines, 2048, shadow=2)
    alone = replace(job, shadow=0, cluster=replace(cluster, servers=0))
    ring = sums(replace(layout, shadow=False, hosted="no"), alone)
    assert sums(layout, job) / ring * 2 * (machines - 1) / machines == pytest.approx(expected)
    memory = rank_memory(job, layout)
    others = servers * memory.cpu_machine + machines * (
        memory.host - rank_memory(alone, replace(layout, shadow=False)).host
    )
    assert others == pytest.approx(2 * 12 * TINY.parameters)


def test_copies_for_which_there_are_no_machines() -> None:
    with pytest.raises(UsageError, match=r"shadow=3: other machines of this cluster can keep up to 2 copies"):
        PlanJob(TINY, replace(CLUSTER, machines=2, servers=1), 16, 2048, shadow=3)


@pytest.mark.parametrize(
    "layout", [JobLayout(1, 1, 1, 16, 1, 4), JobLayout(1, 1, 2, 8, 1, 8)], ids=["flat", "pipeline"]
)
def test_the_backward_pass_of_the_last_micro_batch_hides_the_sums_of_hosted_optimizers(layout: JobLayout) -> None:
    hosted = replace(layout, hosted="machine")
    for gb_per_s in (0.1, 1.0, 1000.0):
        job = replace(JOB, cluster=replace(CLUSTER, network_gb_per_s=gb_per_s))
        whole, exposed = sums(hosted, job), part(hosted, "gradients", job)
        if layout.pp > 1:  # they come at its end
            assert exposed == whole
        backward = part(hosted, "computing", job) / 4 * 2 / 3
        if layout.pp == 1:
            assert exposed == pytest.approx(max(whole / 8, whole - backward * 7 / 8))
            sharded = replace(layout, hosted="sharded")
            whole = sums(sharded, job)  # owners send half of it back after the step
            half = whole / 2
            assert part(sharded, "gradients", job) == pytest.approx(half + max(half / 8, half - backward * 7 / 8))
        assert part(layout, "gradients", job) == sums(layout, job)


def test_a_step_does_not_end_before_a_shadow_has_the_sums_of_the_one_before() -> None:
    """Of machines that add their sums alone."""
    job = PlanJob(TINY, replace(CLUSTER, machines=1, servers=1, network_gb_per_s=0.1), 8, 2048, shadow=True)
    layout = JobLayout(1, 1, 1, 8, 1, 1, hosted="sharded", shadow=True)
    assert sum(float(each[0]) for each in step_times(job, [layout], times(job)).values()) == pytest.approx(
        1e3 * 4 * TINY.parameters / 1e8
    )
    fast = replace(job, cluster=replace(job.cluster, network_gb_per_s=400))
    assert part(layout, "shadow", fast) == 0


def test_context_parallelism_divides_computing_and_adds_exchanges() -> None:
    alone, shared = JobLayout(1, 1, 1, 16, 1, 4), JobLayout(1, 2, 1, 8, 1, 8)
    assert part(shared, "context parallelism") > 0 == part(alone, "context parallelism")
    assert part(shared, "computing") > part(alone, "computing")  # the same work, in smaller pieces


# ---- memory --------------------------------------------------------------------------------------------------------


def test_states_are_18_bytes_a_parameter_and_divided_as_zero_says() -> None:
    """16 and a copy of 2 bytes for autocast; two layers are gathered, and gradients are not yet reduced."""
    layout = JobLayout(1, 1, 1, 16, 1, 4)
    parameters, layer = TINY.parameters - TINY.hidden, TINY.layer_parameters
    states = {data: rank_memory(JOB, replace(layout, data=data)).states for data in ("ddp", "zero1", "zero2", "zero3")}
    assert states["ddp"] == 18 * parameters
    assert states["zero1"] == (10 + 8 / 16) * parameters
    assert states["zero2"] == (16 / 16 + 6 + 4) * parameters
    assert states["zero3"] == (16 / 16 + 4) * parameters + 12 * layer
    one = rank_memory(JOB, replace(layout, data="zero3", micro_batch=4, micro_batches=1)).states
    assert one == parameters + (12 + 8) * layer  # gradients are reduced as they come


def test_hosted_states_lie_in_the_memory_of_machines() -> None:
    layout = JobLayout(1, 1, 1, 16, 1, 4)
    parameters = TINY.parameters - TINY.hidden
    machine, sharded = (rank_memory(JOB, replace(layout, hosted=how)) for how in ("machine", "sharded"))
    assert machine.states == sharded.states == 10 * parameters
    assert (machine.host, sharded.host) == (8 * parameters, 4 * parameters)


def test_shadows_lie_in_the_memory_of_cpu_machines_or_else_of_gpu_machines() -> None:
    layout = JobLayout(1, 1, 1, 16, 1, 4, hosted="sharded", shadow=True)
    alone, parameters = rank_memory(JOB, replace(layout, shadow=False)), TINY.parameters
    without = rank_memory(JOB, layout)
    assert (without.host, without.cpu_machine) == (alone.host + 6 * parameters, 0)  # 12 bytes, on two machines
    beside = rank_memory(replace(JOB, cluster=replace(CLUSTER, servers=3)), layout)
    assert (beside.host, beside.cpu_machine) == (alone.host, 6 * parameters)  # the third one has no share
    assert without.total == beside.total == alone.total


def test_recomputation_keeps_inputs_and_one_stage() -> None:
    layout = JobLayout(1, 1, 4, 4, 4, 4, schedule="gpipe")
    kept, again = rank_memory(JOB, layout), rank_memory(JOB, replace(layout, recompute=True))
    assert again.states == kept.states
    assert again.activations < 0.6 * kept.activations
    more = rank_memory(JOB, JobLayout(1, 1, 4, 4, 1, 16, schedule="gpipe", recompute=True))
    assert more.activations < again.activations  # smaller micro-batches: a smaller stage to compute again


def test_tensor_and_context_parallelism_divide_activations() -> None:
    whole = rank_memory(JOB, JobLayout(1, 1, 1, 16, 4, 1)).activations
    assert rank_memory(JOB, JobLayout(2, 1, 1, 8, 4, 2)).activations == whole / 2
    assert rank_memory(JOB, JobLayout(1, 2, 1, 8, 4, 2)).activations == whole / 2


# ---- the plan ------------------------------------------------------------------------------------------------------


def test_possible_layouts_divide_everything() -> None:
    layouts = list(possible_layouts(JOB))
    assert len(layouts) == len(set(layouts)) > 500
    for layout in layouts:
        assert layout.tp * layout.cp * layout.pp * layout.dp == 16
        assert layout.tp <= 8
        assert layout.dp * layout.micro_batch * layout.micro_batches == 64
        assert layout.pp <= 8
        assert not (layout.recompute and layout.pp == 1)  # parallelize_model recomputes in pipelines only
        assert layout.hosted == "no" or layout.data == "ddp"
        if layout.schedule in ("chimera", "gems"):
            assert layout.pp % 2 == 0
    assert {layout.schedule for layout in layouts} == set(SCHEDULES)
    assert {layout.data for layout in layouts} == {"ddp", "zero1", "zero2", "zero3", "hsdp"}


def plan(memory_gb: float, job: PlanJob = JOB) -> LayoutPlan:
    return plan_layouts(replace(job, cluster=replace(job.cluster, memory_gb=memory_gb)), times(job), 10)


def test_the_fastest_that_fit_come_first_and_the_others_say_what_they_lack() -> None:
    roomy, tight = plan(80), plan(6)
    for found, limit in ((roomy, 80e9), (tight, 6e9)):
        assert all(each.memory.total <= limit for each in found.best)
        assert found.best[0].step_ms <= found.fitting[0].step_ms * 1.005
        assert [each.step_ms for each in found.best[1:]] == sorted(each.step_ms for each in found.best[1:])
        assert all(sum(each.parts.values()) == pytest.approx(each.step_ms) for each in found.best)
    assert tight.best[0].step_ms > roomy.best[0].step_ms
    faster = tight.as_json()["does_not_fit"]["faster"]
    assert all(each["lacking_gb"] > 0 and each["step_ms"] < tight.best[0].step_ms for each in faster)
    assert any("would be faster and do not fit" in reason for reason in tight.reasons)
    json.dumps(tight.as_json())


def test_a_model_that_does_not_fit_says_how_much_is_lacking() -> None:
    with pytest.raises(UsageError, match=r"the model does not fit: .* needs least, .* are lacking"):
        plan_layouts(PlanJob(known_model("llama3-405b"), CLUSTER, 64, 8192), times())


def test_a_batch_that_no_layout_divides() -> None:
    model = ModelShape(1, 64, 1, 1, 64, 100)
    with pytest.raises(UsageError, match="no layout is possible for 16 GPUs and 3 sequences"):
        plan_layouts(PlanJob(model, CLUSTER, 3, 63), times())


def test_late_weights_have_no_bubble_and_need_versions() -> None:
    layouts = {name: replace(LAYOUT, schedule=name) for name in ("dapple", "pipedream", "pipedream-2bw")}
    assert part(layouts["pipedream"], "pipeline bubble") == part(layouts["pipedream-2bw"], "pipeline bubble") == 0
    for name in ("gradients", "optimizer"):
        often, once = (part(layouts[each], name) for each in ("pipedream", "pipedream-2bw"))
        assert once == part(layouts["dapple"], name)
        assert often == pytest.approx(16 * once)
    need = {name: rank_memory(JOB, layout) for name, layout in layouts.items()}
    assert len({each.activations for each in need.values()}) == 1
    version = need["pipedream-2bw"].states - need["dapple"].states
    assert need["pipedream"].states - need["dapple"].states == 3 * version
    for name in ("pipedream", "pipedream-2bw"):
        program = make(name, 4, 16)
        assert max(program.peak_in_flight()) == under_way(layouts[name])[0]
        assert max(program.weight_versions) - 1 == (need[name].states - need["dapple"].states) / version


def test_layouts_with_late_weights_are_planned_only_if_asked_for() -> None:
    found = set(possible_layouts(replace(JOB, stale=True))) - set(possible_layouts(JOB))
    assert {each.schedule for each in found} == {"pipedream", "pipedream-2bw"}
    for each in found:
        assert (each.tp, each.cp, each.data, each.hosted) == (1, 1, "ddp", "no")
        assert each.pp > 1
        assert each.schedule == "pipedream" or each.micro_batches >= each.pp
    assert not any(each.is_stale for each in possible_layouts(replace(JOB, stale=True, shadow=True)))
    assert options_of(replace(LAYOUT, schedule="pipedream-2bw", recompute=True)) == {
        "schedule": "pipedream-2bw",
        "micro_batches": 16,
        "recompute": True,
    }


def test_plans_with_shadows_have_hosted_states_only() -> None:
    job = replace(JOB, shadow=True)
    found = plan(80, job)
    assert {each.layout.hosted for each in found.fitting} == {"sharded", "machine"}
    assert all(each.layout.shadow for each in (*found.fitting, *found.too_large))
    best = found.best[0]
    assert best.as_json()["options"]["shadow"] is True
    assert "shadow" in str(best.layout)
    assert any(reason.startswith("A GPU machine keeps ") for reason in found.reasons)
    beside = plan(80, replace(job, cluster=replace(CLUSTER, servers=2)))
    assert any(reason.startswith("A CPU machine keeps ") for reason in beside.reasons)
    with pytest.raises(UsageError, match="a shadow is on another machine, and the cluster has only one"):
        PlanJob(TINY, Cluster(1, 8, 80, 312, 2039, 300), 8, 2048, shadow=True)


def test_one_gpu() -> None:
    job = PlanJob(TINY, Cluster(1, 1, 80, 312, 2039, 300), 4, 2048)
    assert plan_layouts(job, times(job)).best[0].layout == JobLayout(1, 1, 1, 1, 4, 1)


# ---- clusters ------------------------------------------------------------------------------------------------------

GOOD = {
    "machines": 2,
    "gpus_per_machine": 4,
    "memory_gb": 40,
    "peak_tflops": 312,
    "memory_gb_per_s": 1555,
    "machine_gb_per_s": 300,
    "network_gb_per_s": 50,
}


def write(folder: Path, text: str) -> str:
    path = folder / "cluster.json"
    path.write_text(text)
    return str(path)


def test_a_cluster_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(GOOD))
    assert read_cluster(path).gpus == 8
    assert load_cluster(path, 3).gpus == 12
    assert load_cluster("h100", 8).gpus == 64


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"network_gb_per_s": 0}, "network_gb_per_s is 0: nothing moves at this rate"),
        ({"machine_gb_per_s": 0}, "machine_gb_per_s is 0: nothing moves at this rate"),
        ({"network_gb_per_s": None}, "network_gb_per_s is missing: 2 machines need a network"),
        ({"network_gb_per_s": "fast"}, "network_gb_per_s='fast': a number above 0"),
        ({"memory_gb": -1}, "memory_gb=-1: a number above 0"),
        ({"memory_gb": 0}, "memory_gb is 0"),
        ({"machines": 1.5}, "machines=1.5: a whole number of at least 1"),
        ({"servers": -1}, "servers=-1: a whole number of at least 0"),
        ({"cores": 8}, "has 'cores': a cluster has machines, "),
    ],
)
def test_clusters_that_cannot_be(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_cluster(write(tmp_path, json.dumps(GOOD | changed)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has a list; it must have an object with machines, "),
        ('{"machines": 1}', "lacks gpus_per_machine, memory_gb"),
    ],
)
def test_files_that_are_no_clusters(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_cluster(write(tmp_path, text))


def test_unknown_machines_are_named() -> None:
    with pytest.raises(UsageError, match="unknown machine 'b200': known ones are a100, h100"):
        load_cluster("b200", 2)
