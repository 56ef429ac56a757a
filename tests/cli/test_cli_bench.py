"""`bps bench`: on this machine, with and without services, and under another launcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from support.clusters import clean_environment

from byteps_py.cli.__main__ import main as bps
from byteps_py.cli.bench import busiest_over_optimum, optimum_s, to_text

OWN = [sys.executable, "-m", "byteps_py.cli", "bench"]


def bench(*arguments: str, command: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *OWN, *arguments], capture_output=True, text=True, timeout=110, env=clean_environment(**variables)
    )


@pytest.mark.slow
def test_one_machine() -> None:
    done = bench("--sizes", "4K,1M", "--repeats", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(each["bytes"], each["optimum_s"]) for each in found["times"]] == [(4096, None), (1 << 20, None)]
    assert all(each["gloo_s"] > 0 and each["byteps_s"] > 0 for each in found["times"])
    assert (found["ranks"], found["machines"], found["servers"], found["busiest_over_optimum"]) == (2, 1, 0, None)
    assert "One machine needs no network" in to_text(found)


@pytest.mark.slow
def test_emulated_machines_carry_what_the_formula_says() -> None:
    done = bench(
        "--ranks", "1", "--machines", "2", "--servers", "1", "--sizes", "1M", "--repeats", "2", BYTEPS_LINK_MBIT="10000"
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks on 2 GPU machines, 1 CPU machine\n" in done.stdout
    [ratio] = re.findall(r"The busiest link carries (\S+) times the optimum's bytes", done.stdout)
    assert 0.99 < float(ratio) < 1.05
    [row] = re.findall(r"^ +1,048,576 .*", done.stdout, re.MULTILINE)
    assert "–" not in row


@pytest.mark.long
def test_ranks_of_another_launcher() -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python")
    done = bench("--sizes", "64K", "--repeats", "1", "--json", command=command)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2


def test_rates_of_links_give_the_optimum() -> None:
    def members(scale: int) -> list[dict[str, object]]:
        common = {"alive": True, "link_mbit": 100.0}
        return [
            {**common, "member_id": number, "kind": kind, "machine": machine, "machine_id": machine,
             "bytes_sent": sent * scale, "bytes_received": received * scale}
            for number, (kind, machine, sent, received) in enumerate([
                ("worker", "GPU 0", 1000, 1000), ("worker", "GPU 1", 1000, 1000), ("server", "CPU", 1000, 1100),
            ])
        ]  # fmt: skip

    assert optimum_s(1000, [100.0], [100.0, 100.0]) == pytest.approx(1000 * 8e-6 / 100)
    assert busiest_over_optimum(members(1), members(2), 1000) == pytest.approx(1.1)
    assert busiest_over_optimum(members(1), members(1), 1000) is None  # ranks send to each other
    assert optimum_s(1000, [], [100.0]) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--sizes", "1T"], "takes sizes from 4 to 4G"), (["--repeats", "0"], "at least one all-reduce is timed")],
)
def test_what_can_not_be_timed(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith(("DMLC_", "BYTEPS_"))]:
        monkeypatch.delenv(name)
    try:
        code = bps(["bench", *arguments])
    except SystemExit as ended:  # argparse
        code = int(ended.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err
