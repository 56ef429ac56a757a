"""`bps topology`, as a user runs it, and what `bps doctor` says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.recorded_machines import MACHINES, from_sysfs, from_xml, make_tree

from byteps_py.cli.__main__ import main as bps
from byteps_py.doctor.machine_checks import check_topology
from byteps_py.topology import nccl_xml, sysfs

PAPER = str(MACHINES / "paper-pcie.xml")


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert bps(["topology", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_machine_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, "--file", PAPER)
    assert lines[0] == "machine  2 NUMA nodes, 8 GPUs, 1 NIC"
    assert "best     cpu-assisted: 133.3 ms for 1.0 GB in each GPU" in lines
    assert "limit    0000:01:00.0 → 0000:00:00.0: 1.75 × the gradients of a GPU" in lines
    assert "others   host-sum: 304.8 ms" in lines
    [applied] = [line for line in lines if line.startswith("applied")]
    assert "as BYTEPS_LOCAL_SUM=host" in applied
    assert "         local ranks 4-7: CPUs 16-31, 48-63" in lines
    assert "         services: CPUs 0-15, 32-47" in lines
    [why] = [line for line in lines if "1/5" in line]
    assert "9% faster" in why
    assert "4 times the memory traffic" in why


def test_json_has_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads("\n".join(lines_of(capsys, "--file", PAPER, "--bytes", "8e9", "--json")))
    assert told["applied"] == "host-sum"
    assert [group["is_switch"] for group in told["groups"]] == [True, False, True]
    choice = told["choice"]
    assert (choice["strategy"], choice["probes"]) == ("cpu-assisted", None)
    assert [step["name"] for step in choice["steps"]] == [
        "reduce-scatter", "copy to memory", "sum by the processor", "network", "copy to the GPUs", "all-gather",
    ]  # fmt: skip
    assert {transfer["bytes"] for transfer in choice["steps"][0]["transfers"]} == {2e9}
    assert len(told["pinning"]["ranks"]) == 8
    assert choice["seconds"] == pytest.approx(1.75 * 64 / 105)


def test_a_machine_that_hides_pcie_and_its_measured_rates(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tree = make_tree("hidden-vm", tmp_path / "sys")
    told = json.loads("\n".join(lines_of(capsys, "--sysfs", str(tree), "--json")))
    assert told["is_pcie_hidden"]
    rows = []
    for probe in told["choice"]["probes"]["probes"]:
        together = set(probe["devices"]) <= {"0000:00:04.0", "0000:00:05.0"} and len(probe["devices"]) == 2
        rows.append({"devices": probe["devices"], "gbit": [50.0 if together else 96.0] * len(probe["devices"])})
    (tmp_path / "rates.json").write_text(json.dumps(rows))
    lines = lines_of(capsys, "--sysfs", str(tree), "--rates", str(tmp_path / "rates.json"))
    assert any(line.startswith("best     cpu-assisted") for line in lines)
    assert any("switches come from measured rates" in line for line in lines)
    lines = lines_of(capsys, "--sysfs", str(tree))
    assert any(line.startswith("best     host-sum: at least ") for line in lines)
    assert any(line.startswith("measure  copy from each of 5 devices alone") for line in lines)


def test_a_file_and_what_its_devices_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, tree = str(MACHINES / "aws-g5-48xl.xml"), str(make_tree("aws-g5", tmp_path))
    assert lines_of(capsys, "--file", file, "--sysfs", tree)[0] == "machine  2 NUMA nodes, 8 GPUs, 1 NIC"


def test_a_job_that_uses_some_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, "--file", PAPER, "--gpus", "0,1,2,3")
    assert lines[0] == "machine  2 NUMA nodes, 4 GPUs, 1 NIC"
    assert any(line.startswith("best     one-switch: ") for line in lines)


def test_xml_is_a_topology_file(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(lines_of(capsys, "--file", PAPER, "--xml"))
    assert nccl_xml.parse(text.encode()) == from_xml("paper-pcie")


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    if not (sysfs.SYSFS / "bus" / "pci" / "devices").is_dir():
        pytest.skip("this machine has no PCI bus")
    assert lines_of(capsys)[0].startswith("machine  ")


@pytest.mark.parametrize(
    ("content", "arguments", "why"),
    [
        (None, ["--file", "{}"], "can't be read: No such file or directory"),
        ("<a/>", ["--file", "{}"], "begins with <a>"),
        (None, ["--sysfs", "{}"], "is not there"),
        ("[1]", ["--file", PAPER, "--rates", "{}"], "is no list of rates like"),
        ("[" * 10_000, ["--file", PAPER, "--rates", "{}"], "is no list of rates like"),
        ("[]", ["--file", PAPER, "--rates", "{}"], "there is no rate for 0000:01:00.0"),
        (None, ["--file", PAPER, "--bytes", "-1"], "--bytes takes a number above 0"),
        (None, ["--file", PAPER, "--bytes", "nan"], "--bytes takes a number above 0"),
        (None, ["--file", PAPER, "--gpus", "0,8"], "--gpus takes numbers below 8"),
        (None, ["--file", PAPER, "--gpus", "all"], "--gpus takes numbers below 8"),
        (None, ["--file", PAPER, "--ranks", "0"], "--ranks takes a number from 1 to 1024"),
    ],
)
def test_wrong_input(
    content: str | None, arguments: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "given"
    if content is not None:
        given.write_text(content)
    assert bps(["topology", *(each.format(given) for each in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bps: ")
    assert why in error
    assert len(error.splitlines()) == 1


def test_what_doctor_says(tmp_path: Path) -> None:
    [found] = check_topology(lambda: from_xml("paper-nvlink"))
    assert (found.level, found.subject) == ("ok", "topology")
    assert found.text.startswith("reduce-broadcast is best: Sn = 1 and Sg = 3")
    [_, found] = check_topology(lambda: from_xml("paper-nvlink"), "exact")
    assert found.text.startswith("reduce-broadcast, with BYTEPS_LOCAL_SUM=exact: Sn = 1 and Sg = 3")
    [_, found] = check_topology(lambda: from_xml("paper-pcie"), "exact", 8)
    assert found.text.startswith("host-sum, with BYTEPS_LOCAL_SUM=exact: cpu-assisted adds in 2 groups of GPUs")
    [found] = check_topology(lambda: from_sysfs("no-gpu", tmp_path))
    assert "the machine has no GPU" in found.text
    [found] = check_topology(lambda: sysfs.read(tmp_path / "nothing"))
    assert "can't be read" in found.text
