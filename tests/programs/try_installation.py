"""Tries an installation of byteps_py, without the source tree: `make dist` runs it with a new environment's Python.

    build/dist/try/bin/python -P tests/programs/try_installation.py NAME

With torch, two ranks on two emulated machines sum a tensor, through a third one that only sums. Without torch, a
summation service joins a scheduler, and leaves when the job is stopped. Prints a line that begins with NAME, and exits
with 1 if something is wrong.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
LIMIT_S = 120.0

PROGRAM = """
import torch
import byteps_py as bps
bps.init()
total = bps.allreduce(torch.full((1 << 20,), bps.rank() + 1.0), op=bps.Sum, name="total")
assert bps.size() == 2 and torch.equal(total, torch.full((1 << 20,), 3.0)), total
print("summed", flush=True)
bps.shutdown()
"""


def run(*words: str, **variables: str) -> str:
    """The output of a command of this environment. Raises SystemExit if it fails."""
    done = subprocess.run(
        [str(BIN / words[0]), *words[1:]], env={**clean(), **variables}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed with {done.returncode}:\n{done.stdout}")
    return done.stdout


def clean() -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("DMLC_", "BYTEPS_", "PYTHON"))}
    return {**kept, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def sum_of_two_ranks() -> str:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM)
        output = run("bpslaunch", "-np", "1", "--machines", "2", "--servers", "1", "python", str(program))
    if output.count("summed") != 2:
        raise SystemExit(f"two ranks have not summed:\n{output}")
    return f"torch {importlib.metadata.version('torch')}: two ranks have summed through bpslaunch"


def server_comes_and_goes() -> str:
    from byteps_py.launch.process_plan import free_port

    where = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port())}
    where |= {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"}
    started = []
    try:
        for role in ("scheduler", "server"):
            variables = {**clean(), **where, "DMLC_ROLE": role}
            started.append(subprocess.Popen([str(BIN / "bpslaunch")], env=variables))
        deadline_s = time.monotonic() + LIMIT_S
        while not has_server(where):
            if time.monotonic() > deadline_s or any(each.poll() is not None for each in started):
                raise SystemExit("no summation service has joined the scheduler")
        run("bps", "stop", **where)
        codes = [each.wait(LIMIT_S) for each in started]
    finally:
        for each in started:
            each.kill()
    if any(codes):
        raise SystemExit(f"scheduler and server ended with {codes}")
    return "no torch: a summation service has joined a job, and left it"


def has_server(where: dict[str, str]) -> bool:
    asked = subprocess.run(
        [str(BIN / "bps"), "status", "--json"], env={**clean(), **where}, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if asked.returncode:
        return False  # the scheduler is not up yet
    return any(member["kind"] == "server" and member["alive"] for member in json.loads(asked.stdout)["members"])


def main() -> None:
    import byteps_py

    if BIN.parent not in Path(byteps_py.__file__).parents:
        raise SystemExit(f"byteps_py is {byteps_py.__file__}, which is not of the environment {BIN.parent}")
    if "commands:" not in run("bps", "--help"):
        raise SystemExit("bps --help lists no commands")
    python = ".".join(map(str, sys.version_info[:3]))
    tried = server_comes_and_goes() if importlib.util.find_spec("torch") is None else sum_of_two_ranks()
    print(f"{sys.argv[1]}: {run('bps', '--version').strip()}, Python {python}, {tried}", flush=True)


if __name__ == "__main__":
    main()
