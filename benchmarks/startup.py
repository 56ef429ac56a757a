"""How long a user waits for byteps_py to start, with and without compiled kernels on disk.

    python benchmarks/startup.py [--rounds N] [--json FILE]

    init, 1 process    bps.init() of a process that is alone
    init, 2 ranks      bps.init() under bpslaunch -np 2, the later of the two; torch is imported before, as scripts do
    init, no torch     the same without importing torch: from the ranks' first line until both are in the session
    first round        the first sum of 1000 float32 right after it, the later of the two
    server ready       a server from exec until the scheduler knows it

Every figure is of fresh processes. Cold: an empty cache of kernels, in which the first server and the first ranks
leave theirs. Warm: what the cold round has left behind. A server is ready, and init() returns, without waiting for
kernels; what loading or compiling one costs is measured by benchmarks/kernels.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError
from byteps_py.launch.process_plan import free_port
from byteps_py.scheduler import query

TARGET_S = {"init, 1 process": 1.5, "init, 2 ranks": 1.5, "init, no torch": 1.5, "server ready": 2.0}
LIMIT_S = 60.0

WITH_TORCH = """
import json, time
import torch
import byteps_py as bps
bps.push_pull  # the interface is loaded on first use
start = time.perf_counter()
bps.init()
ready = time.perf_counter()
bps.push_pull(torch.ones(1000), name="first")
print(json.dumps({"init": ready - start, "first round": time.perf_counter() - ready}), flush=True)
bps.shutdown()
"""
WITHOUT_TORCH = """
import json, time
start = time.perf_counter()
from byteps_py.session import open_session
session = open_session()
print(json.dumps({"init": time.perf_counter() - start}), flush=True)
session.close()
"""


def ranks(program: str, count: int, environ: dict[str, str]) -> dict[str, float]:
    """The largest of what the ranks have measured."""
    launcher = [sys.executable, "-m", "byteps_py.launch", "--no-tag-output", "-np", str(count)] if count > 1 else []
    command = [*launcher, sys.executable, "-c", program]
    done = subprocess.run(command, env=environ, check=True, timeout=LIMIT_S, stdout=subprocess.PIPE, text=True)
    found = [json.loads(each) for each in re.findall(r"{.*?}", done.stdout)]  # ranks share lines now and then
    if len(found) != count:
        raise SystemExit(f"{len(found)} of {count} ranks have answered:\n{done.stdout}")
    return {name: max(each[name] for each in found) for name in found[0]}


def server_ready_s(environ: dict[str, str]) -> float:
    """From a server's exec until the scheduler lists it."""
    port = free_port()
    environ = {
        **environ,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1",
        "BYTEPS_JOB_ID": "startup",
    }
    settings = dataclasses.replace(
        Settings(), scheduler_host="127.0.0.1", scheduler_port=port, num_workers=2, num_servers=1, job_id="startup"
    )
    scheduler = subprocess.Popen([sys.executable, "-m", "byteps_py.scheduler"], env=environ, stderr=subprocess.DEVNULL)
    server = None
    try:
        wait_for_members(settings, 0)
        start = time.perf_counter()
        server = subprocess.Popen([sys.executable, "-m", "byteps_py.server"], env=environ, stderr=subprocess.DEVNULL)
        wait_for_members(settings, 1)
        return time.perf_counter() - start
    finally:
        for process in (server, scheduler):
            if process is not None:
                process.terminate()
                process.wait(LIMIT_S)


def wait_for_members(settings: Settings, count: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            if len(query.status(settings, 1.0).members) >= count:
                return
        except BytePSError as error:  # the scheduler is not there yet
            if time.monotonic() > deadline:
                raise SystemExit(f"the scheduler does not answer: {error}") from error
        time.sleep(0.01)


def one_round(cache: str) -> dict[str, float]:
    environ = {**os.environ, "NUMBA_CACHE_DIR": cache}
    alone = ranks(WITH_TORCH, 1, environ)
    found = {"init, 1 process": alone["init"]}
    # Servers first: in a cold round nobody has compiled for them.
    found["server ready"] = server_ready_s(environ)
    together = ranks(WITH_TORCH, 2, environ)
    found["init, 2 ranks"], found["first round"] = together["init"], together["first round"]
    found["init, no torch"] = ranks(WITHOUT_TORCH, 2, environ)["init"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the results here")
    options = parser.parse_args()
    samples: dict[str, dict[str, list[float]]] = {"cold": {}, "warm": {}}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for found in samples.values():
                for name, value in one_round(cache).items():
                    found.setdefault(name, []).append(value)
    print(f"{'seconds':18} {'cold':>8} {'warm':>8} {'range, warm':>14} {'target':>7}")
    for name, warm in samples["warm"].items():
        target = f"{TARGET_S[name]:7.1f}" if name in TARGET_S else ""
        print(
            f"{name:18} {statistics.median(samples['cold'][name]):8.2f} {statistics.median(warm):8.2f} "
            f"{f'{min(warm):.2f}–{max(warm):.2f}':>14} {target}"
        )
    if options.json:
        options.json.write_text(json.dumps(samples, indent=1) + "\n")


if __name__ == "__main__":
    main()
