"""The cluster of a plan, from figures of `bps doctor` and of running jobs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from byteps_py.cli.__main__ import main
from byteps_py.doctor.link_checks import job_figures
from byteps_py.doctor.machine_checks import check_cores, check_memory
from byteps_py.errors import UsageError
from byteps_py.tools.plan.cluster import (
    KNOWN,
    Cluster,
    changed,
    facts_of,
    facts_of_findings,
    measure_rates,
    with_measured_cores,
)

CORES = [each.as_json() for each in (*check_cores(16, 16, None), *check_memory(64 * 10**9))]
RATES = {"peak_tflops": 1.6, "memory_gb_per_s": 80.0}


def gpus(name: str) -> list[dict[str, Any]]:
    return [*CORES, {"figures": {"gpus": 8, "gpu_name": name, "gpu_memory_bytes": 85 * 10**9}}]


def job(*members: dict[str, Any]) -> dict[str, Any]:
    common = {"alive": True, "left": False, "kind": "worker", "machine": "GPU 0", "local_size": 4, "link_mbit": 8000.0}
    return {"figures": job_figures({"members": [common | member for member in members]})}


JOB = job(
    {"machine_id": "a"},
    {"machine_id": "a", "kind": "server", "local_size": None, "link_mbit": 0.0},
    {"machine_id": "b", "link_mbit": 4000.0},
    {"machine_id": "c", "alive": False, "local_size": 7},
    {"machine_id": "d", "kind": "server", "machine": "CPU", "local_size": None, "link_mbit": 9000.0},
)


def test_cores_of_one_machine() -> None:
    facts = facts_of_findings(CORES, "here")
    assert facts.values == {"machines": 1, "gpus_per_machine": 16, "memory_gb": 4.0}
    assert facts.missing == ["peak_tflops", "memory_gb_per_s", "machine_gb_per_s"]
    with pytest.raises(UsageError, match=r"the cluster lacks peak_tflops, .* give --set peak_tflops=… .*--measure"):
        facts.cluster()
    measured = with_measured_cores(facts, RATES)
    assert measured.cluster() == Cluster(1, 16, 4.0, 0.1, 5.0, 2.5)


@pytest.mark.parametrize(
    ("name", "sheet"), [("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA L4", "")]
)
def test_gpus_of_one_machine(name: str, sheet: str) -> None:
    facts = facts_of_findings(gpus(name), "here")
    if sheet:
        assert facts.cluster() == replace(KNOWN[sheet], memory_gb=85.0, network_gb_per_s=None)
    else:
        assert facts.missing == ["peak_tflops", "memory_gb_per_s", "machine_gb_per_s"]


def test_a_job_tells_its_machines_and_its_slowest_link() -> None:
    facts = with_measured_cores(facts_of_findings([*CORES, JOB], "the job"), RATES)
    assert facts.cluster() == Cluster(2, 4, 16.0, 0.4, 20.0, 10.0, network_gb_per_s=0.5, servers=1)
    assert "memory that the running job uses" in facts.remarks[0]
    elsewhere = facts_of_findings([JOB], "the job")  # it runs on other machines than this one
    assert elsewhere.missing == ["memory_gb", "peak_tflops", "memory_gb_per_s", "machine_gb_per_s"]


def test_a_link_that_nobody_has_measured_is_missing() -> None:
    unknown = job({"machine_id": "a", "link_mbit": 0.0}, {"machine_id": "b", "link_mbit": 0.0})
    facts = with_measured_cores(facts_of_findings([*CORES, unknown], "the job"), RATES)
    assert facts.missing == ["network_gb_per_s"]
    one = with_measured_cores(facts_of_findings([*CORES, job({"machine_id": "a"})], "the job"), RATES)
    assert one.cluster().network_gb_per_s is None


def test_machines_of_different_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="machines of this job have 2 to 4 ranks, and a plan is for equal machines"):
        facts_of_findings([job({"machine_id": "a"}, {"machine_id": "b", "local_size": 2})], "the job")


@pytest.mark.parametrize("found", [[1], [{}], [{"figures": 1}], [{"subject": "cores", "text": "2 cores"}]])
def test_lists_that_are_no_findings(found: list[Any]) -> None:
    with pytest.raises(UsageError, match=r"x\.json has no figures: a list of `bps doctor --json` of this version"):
        facts_of_findings(found, "x.json")


def test_given_values_replace_known_ones() -> None:
    facts = changed(facts_of(KNOWN["h100"], "h100"), ["machines=4", "memory_gb=71.5"])
    assert facts.cluster() == replace(KNOWN["h100"], machines=4, memory_gb=71.5)
    assert facts.sources["machines"] == "given"
    for wrong in ("memory=3", "memory_gb", "memory_gb=much"):
        with pytest.raises(UsageError, match=r"give NAME=NUMBER; names are machines, "):
            changed(facts, [wrong])
    with pytest.raises(UsageError, match="memory_gb=inf: a number above 0"):
        changed(facts, ["memory_gb=inf"]).cluster()


def test_rates_are_measured() -> None:
    ticks = iter(range(1000))
    rates = dict(measure_rates(lambda: float(next(ticks))))
    assert rates == {"peak_tflops": 2 * 1024**3 / 1e12, "memory_gb_per_s": 2 * (64 << 20) / 1e9}


def test_a_cluster_is_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doctor, cluster = tmp_path / "doctor.json", tmp_path / "cluster.json"
    doctor.write_text(json.dumps(CORES))
    assert main(["plan", "cluster", str(doctor), "--out", str(cluster)]) == 2
    captured = capsys.readouterr()
    assert "gpus_per_machine            16  cores" in captured.out
    assert "the cluster lacks peak_tflops, memory_gb_per_s, machine_gb_per_s" in captured.err
    assert not cluster.exists()
    rates = [f"--set={name}=1" for name in ("peak_tflops", "memory_gb_per_s", "machine_gb_per_s")]
    assert main(["plan", "cluster", str(doctor), *rates, "--out", str(cluster), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == []
    assert main(["plan", "cluster", str(cluster), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"]["gpus_per_machine"] == 16


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "cluster", "here", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"]["machines"] == 1
    assert found["cluster"]["gpus_per_machine"] >= 1


def test_a_job_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "cluster", "127.0.0.1:1", "--timeout", "0.5"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
