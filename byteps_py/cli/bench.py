"""`bps bench`: all-reduces of this package beside gloo's, on this machine or on the user's own cluster, and how near
they are to what placement's formula allows.

Started by hand, it starts bpslaunch, whose ranks are this command again. Started by bpslaunch, torchrun, mpirun or
srun, it is a rank of the job that is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from byteps_py import __version__
from byteps_py.cli.command import add_command, add_json
from byteps_py.errors import ConfigurationError, UsageError
from byteps_py.system.terminal import ProgressBar
from byteps_py.wording import count_text

if TYPE_CHECKING:
    from byteps_py.tools.all_reduce_bench import AllReduceBench, AllReduceTimes

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MOST_BYTES = 4 << 30
_SETTLE_S, _SETTLE_LIMIT_S = 0.5, 15.0
_CARRIED_BYTES, _CARRIED_TIMES = 16 << 20, 4


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = add_command(
        subparsers,
        "bench",
        help="time all-reduces beside gloo's, and beside the formula",
        description="Time all-reduces (float32, in place) of this package and of gloo, by turns, in the same ranks: "
        "the median of the slowest rank. By hand, it starts the ranks on this machine. For your own cluster, start it "
        "as you start a training: bpslaunch bps bench on each machine, with the same variables. Needs PyTorch.",
        example="bps bench --ranks 1 --machines 2 --servers 1 --sizes 1M,64M",
        exits={1: "a sum is wrong, or the job failed"},
    )
    parser.add_argument(
        "--sizes", type=_sizes, default=_sizes("64K,1M,16M,64M"), metavar="B,B,…",
        help="bytes of the tensors; K, M and G stand for 2^10, 2^20 and 2^30; default 64K,1M,16M,64M",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="all-reduces of each size; default 10")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="by hand: ranks of each machine; default 2")
    parser.add_argument("--machines", type=int, default=1, metavar="N", help="by hand: GPU machines to emulate")
    parser.add_argument("--servers", type=int, default=0, metavar="K", help="by hand: CPU machines to emulate")
    add_json(parser)
    parser.set_defaults(handler=run)


def _sizes(text: str) -> list[int]:
    sizes = []
    for each in text.split(","):
        found = re.fullmatch(r"(\d+)([KMG]?)", each.strip().upper())
        if found is None or not 4 <= int(found[1]) * _UNITS[found[2]] <= _MOST_BYTES:
            raise argparse.ArgumentTypeError(f"takes sizes from 4 to 4G with commas between them, got {text!r}")
        sizes.append(int(found[1]) * _UNITS[found[2]])
    return sizes


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks, or be one of them."""
    if arguments.repeats < 1:
        raise UsageError(f"--repeats={arguments.repeats}: at least one all-reduce is timed")
    if importlib.util.find_spec("torch") is None:
        raise ConfigurationError("bps bench needs PyTorch, and it is not installed here: pip install '.[torch]'")
    return _run_rank(arguments) if _is_rank(os.environ) else _launch(arguments)


def _launch(arguments: argparse.Namespace) -> NoReturn:
    """Become bpslaunch, with ranks that are this command."""
    sizes = ",".join(map(str, arguments.sizes))
    own = ["bench", "--sizes", sizes, "--repeats", str(arguments.repeats), *(["--json"] if arguments.json else [])]
    python = [sys.executable, "-P", "-m"]
    started = ["-np", str(arguments.ranks), "--machines", str(arguments.machines), "--servers", str(arguments.servers)]
    sys.stdout.flush()
    os.execv(sys.executable, [*python, "byteps_py.launch", "--no-tag-output", *started, *python, "byteps_py.cli", *own])


def _is_rank(environ: Mapping[str, str]) -> bool:
    from byteps_py.config import launchers

    return bool(environ.get("BYTEPS_LOCAL_RANK") or environ.get("RANK") or launchers.facts(environ))


def _run_rank(arguments: argparse.Namespace) -> int:
    """Measure. Rank 0 prints."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # gloo warns of hosts that have no names
    output = os.dup(1)
    os.dup2(2, 1)  # gloo prints, too
    from byteps_py.tools.all_reduce_bench import AllReduceBench

    turns = len(arguments.sizes) * arguments.repeats * 2
    done = 0
    with AllReduceBench() as bench, ProgressBar("timing all-reduces") as bar:

        def turn_done() -> None:
            nonlocal done
            done += 1
            if bench.rank == 0:
                bar.update(done, turns)

        times = [bench.measure(nbytes, arguments.repeats, turn_done) for nbytes in arguments.sizes]
        cluster = _Cluster(bench)
        found = cluster.describe(times)
    if bench.rank == 0:
        text = json.dumps(found, indent=2) if arguments.json else to_text(found)
        os.write(output, f"{text}\n".encode())
    os.close(output)
    return 0


class _Cluster:
    """The answer of the scheduler of this rank's job; all ranks make one at the same place."""

    def __init__(self, bench: AllReduceBench) -> None:
        from byteps_py.config.settings import Settings

        self._bench = bench
        self._settings = Settings.from_env()
        self._status: dict[str, Any] | None = None
        self._carried: float | None = None
        if not self._settings.scheduler_address or self._settings.is_alone:
            return  # one machine needs no scheduler
        before = self._settled() if bench.rank == 0 else None
        bench.barrier()
        summed = bench.carry(_CARRIED_BYTES, _CARRIED_TIMES)
        bench.barrier()
        if before is not None:
            self._status = self._settled()
            self._carried = busiest_over_optimum(before["members"], self._status["members"], summed)
        bench.barrier()

    def _settled(self) -> dict[str, Any]:
        """The status, once the members have reported all that they have carried."""
        from byteps_py.scheduler import query

        found: dict[str, Any] = query.to_dict(query.status(self._settings, 10.0))
        until_s = time.monotonic() + _SETTLE_LIMIT_S
        while time.monotonic() < until_s:
            time.sleep(max(_SETTLE_S, 2 * self._settings.heartbeat_interval_s))
            last, found = found, query.to_dict(query.status(self._settings, 10.0))
            if all(a["bytes_sent"] == b["bytes_sent"] for a, b in zip(last["members"], found["members"], strict=False)):
                break
        return found

    def describe(self, times: list[AllReduceTimes]) -> dict[str, Any]:
        """All that is printed, as plain values: seconds, bytes and Mbit/s."""
        members = self._status["members"] if self._status is not None else []
        cpu, gpu = rates(members)
        is_known = bool(gpu) and (self._settings.link_mbit or not _is_loopback(self._settings.scheduler_host))
        return {
            "version": __version__,
            "torch": self._bench.torch_version,
            "ranks": self._bench.size,
            "machines": max(1, len(gpu)),
            "servers": len(cpu),
            "link_mbit": {"cpu": cpu, "gpu": gpu} if is_known else None,
            "gloo_error": self._bench.gloo_error,
            "busiest_over_optimum": self._carried,
            "times": [
                {
                    "bytes": each.nbytes,
                    "byteps_s": each.byteps_s,
                    "gloo_s": each.gloo_s,
                    "byteps_over_gloo": each.over_gloo,
                    "optimum_s": optimum_s(each.nbytes, cpu, gpu) if is_known else None,
                }
                for each in times
            ],
        }


def _is_loopback(host: str) -> bool:
    from byteps_py.config.addresses import is_loopback

    return is_loopback(host)


def rates(members: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """The rates in Mbit/s that placement uses, of CPU and of GPU machines: one entry for each that is there."""
    present = [member for member in members if member["alive"] and member["link_mbit"]]
    cpu = [member["link_mbit"] for member in present if member["machine"] == "CPU"]
    return cpu, [member["link_mbit"] for member in present if member["kind"] == "worker"]


def optimum_s(nbytes: int, cpu: list[float], gpu: list[float]) -> float | None:
    """The least time in which links of these rates can carry an all-reduce; None on one machine.

    >>> round(optimum_s(1_000_000, [], [800.0] * 2), 3)  # each of two machines sends, and receives, it once
    0.01
    """
    from byteps_py.placement.link_optimum import LinkOptimum

    return float(LinkOptimum(cpu, gpu).time) * nbytes * 8e-6 if len(gpu) > 1 else None


def busiest_over_optimum(before: list[dict[str, Any]], after: list[dict[str, Any]], summed: int) -> float | None:
    """How much longer the busiest link was busy, by the bytes that its services carried, than it would be with the best
    placement. None on one machine, or if ranks have sent to each other directly."""
    cpu, gpu = rates(after)
    best_s = optimum_s(summed, cpu, gpu)
    if best_s is None:
        return None
    earlier = {member["member_id"]: member for member in before}
    carried: dict[str, tuple[int, int]] = {}
    link_mbit = {member["machine_id"]: member["link_mbit"] for member in after if member["link_mbit"]}
    for member in after:
        then = earlier.get(member["member_id"], {"bytes_received": 0, "bytes_sent": 0})
        received, sent = carried.get(member["machine_id"], (0, 0))
        carried[member["machine_id"]] = (
            received + member["bytes_received"] - then["bytes_received"],
            sent + member["bytes_sent"] - then["bytes_sent"],
        )
    if sum(received for received, _ in carried.values()) < summed:
        return None
    busiest_s: float = max(max(each) * 8e-6 / link_mbit[name] for name, each in carried.items() if name in link_mbit)
    return busiest_s / best_s


def to_text(found: dict[str, Any]) -> str:
    """The table for people, without a final newline."""
    lines = [
        f"byteps_py {found['version']}, torch {found['torch']}: {count_text(found['ranks'], 'rank')} on "
        f"{count_text(found['machines'], 'GPU machine')}, {count_text(found['servers'], 'CPU machine')}",
        "",
        f"{'bytes':>13}  {'byteps ms':>9}  {'gloo ms':>9}  {'gloo/byteps':>11}  {'optimum ms':>10}  {'of optimum':>10}",
    ]
    for each in found["times"]:
        own, gloo, best = each["byteps_s"], each["gloo_s"], each["optimum_s"]
        beside = (f"{gloo * 1e3:.3f}", f"{gloo / own:.2f}") if gloo else ("–", "–")
        ideal = (f"{best * 1e3:.3f}", f"{own / best:.2f}") if best else ("–", "–")
        lines.append(
            f"{each['bytes']:>13,}  {own * 1e3:>9.3f}  {beside[0]:>9}  {beside[1]:>11}  {ideal[0]:>10}  {ideal[1]:>10}"
        )
    lines.append("")
    if found["gloo_error"]:
        lines.append(f"gloo can't be used: {found['gloo_error']}")
    if found["machines"] == 1:
        lines.append("One machine needs no network: sums are made in its memory, and the formula says nothing.")
    else:
        if found["link_mbit"] is None:
            lines.append("Links are loopback, without a rate: BYTEPS_LINK_MBIT sets one for the optimum's time.")
        if found["busiest_over_optimum"] is None:
            lines.append("Ranks send large sums to each other directly, by equal parts: the optimum's bytes.")
        else:
            lines.append(f"The busiest link carries {found['busiest_over_optimum']:.3f} times the optimum's bytes.")
    return "\n".join(lines)
