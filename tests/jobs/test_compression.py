"""Sums with codecs, with real processes: bit for bit those of machines and a server in one process, also if servers die
meanwhile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chaos.run import ENVIRON
from jobs.test_recovery import OPTIONS, kill_all, kill_and_return, nothing, run
from support.breaking import launch
from support.clusters import bpslaunch

PROGRAM = Path(__file__).parents[1] / "programs" / "compression.py"


def digests(machines: int, ranks: int, servers: int, *codecs: str, **environ: str) -> set[str]:
    """Run the program, which compares with its own references."""
    done = bpslaunch(
        ["-np", str(ranks), "--machines", str(machines), "--servers", str(servers)],
        [PROGRAM, *codecs],
        BYTEPS_MIN_COMPRESS_BYTES="0",
        BYTEPS_FUSION_BYTES="0",
        BYTEPS_PARTITION_BYTES=str(64 << 10),
        **environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return set(re.findall(r"digest (\w{64})", done.stdout))


def test_like_one_process() -> None:
    assert len(digests(2, 1, 1, "int8", TEST_FLOAT32="1")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [*(pytest.param(each, marks=pytest.mark.long) for each in ((3, 1, 2), (1, 2, 0)))], ids=str
)
def test_each_codec_is_like_one_process(layout: tuple[int, int, int]) -> None:
    assert len(digests(*layout)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_errors_and_momentum_go_on(ranks: int) -> None:
    assert len(digests(2, ranks, 1, "go on")) == 1


@pytest.mark.slow
def test_a_failure_changes_no_bit() -> None:
    assert len(digests(2, 1, 1, "fail")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [(2, 2, 1), *(pytest.param(each, marks=pytest.mark.long) for each in ((3, 1, 0), (1, 2, 0)))], ids=str
)
def test_hosted_optimizers_step_with_the_same_sums(layout: tuple[int, int, int]) -> None:
    assert len(digests(*layout, "hosted")) == 1


@pytest.mark.slow
def test_ranks_that_are_not_finite_are_named() -> None:
    codecs = ["int8", "e5m2", "topk ef", "onebit ef", "randomk ef", "linear", "natural ef", "thc"]
    assert len(digests(2, 1, 1, *codecs, BYTEPS_NONFINITE="raise")) == 1


@pytest.mark.slow
def test_rules_and_warm_up() -> None:
    assert len(digests(2, 1, 1, "rules")) == 1


@pytest.mark.slow
def test_ranks_join() -> None:
    assert len(digests(3, 1, 1, "join")) == 1


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "codec", ["int8", "topk", *(pytest.param(each, marks=pytest.mark.long) for each in ("randomk", "dithering", "thc"))]
)
def test_servers_die_and_the_weights_are_the_same(codec: str) -> None:
    environ = {"TEST_COMPRESSION": codec, "BYTEPS_MIN_COMPRESS_BYTES": "0"}
    faults = [nothing, kill_and_return(), kill_all] if codec != "int8" else [nothing, kill_and_return("--gpu-machine")]
    faults.append(nothing)  # the ranks wait for it until the servers are back
    assert not environ.keys() & ENVIRON.keys()
    assert run(OPTIONS, faults, **environ) == run(OPTIONS, [nothing] * len(faults), **environ)


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec", ["topk", *(pytest.param(each, marks=pytest.mark.long) for each in ("momentum", "thc", "powersgd"))]
)
def test_ranks_that_are_started_again_go_on_with_what_was_not_sent(codec: str, tmp_path: Path) -> None:
    """From checkpoints: there is no shadow."""
    program, found = str(PROGRAM.with_name("restarted_compression.py")), []
    for options, kills in (("", ""), ("--max-restarts 5 ", "1:3:backward 0:5:after")):
        folder = tmp_path / (options or "undisturbed").strip()
        folder.mkdir()
        environ = {"BYTEPS_MIN_COMPRESS_BYTES": "0", "TEST_KILLS": kills}
        with launch(f"{options}-np 1 --machines 2 --servers 1", codec, str(folder), program=program, **environ) as job:
            assert job.end() == 0, job.text
        found.append(set(re.findall(r"rank (\d ends: \w{64})", job.text)))
    assert len(found[0]) == 2
    assert found[0] == found[1]
    assert len(re.findall(r"begins at step [1-9]", job.text)) >= 4
