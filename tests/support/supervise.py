"""A program for tests: supervises Python snippets, as bpslaunch supervises ranks and services.

python supervise.py '{"specs": [["rank 0", "main", "0", "print(1)"], …], "how": {"grace_s": 0.2}}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from byteps_py.launch.process_plan import ProcessKind, ProcessSpec
from byteps_py.launch.supervision_policy import ENDING_SIGNALS
from byteps_py.launch.supervisor import Supervision, Supervisor


def main() -> int:
    # A shell starts what it runs in the background with SIGINT ignored, nohup with SIGHUP: tests may be run so.
    for signum in ENDING_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    given = json.loads(sys.argv[1])
    how = given["how"]
    if "folder" in how:
        how["folder"] = Path(how["folder"])
    how.setdefault("tag_output", False)
    specs = [
        # -S -E: these children need the standard library only, and start fast.
        ProcessSpec(name, ProcessKind(kind), label, (sys.executable, "-S", "-E", "-u", "-c", code), {}, label == "0")
        for name, kind, label, code in given["specs"]
    ]
    return Supervisor(specs, os.environ, Supervision(**how), os.urandom(8).hex()).run().code


if __name__ == "__main__":
    sys.exit(main())
