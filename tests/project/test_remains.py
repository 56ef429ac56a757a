"""What every test with real processes asks at the end of a job finds what is left, also of a child without its mark."""

from __future__ import annotations

import re
import sys

import pytest
from support.breaking import command
from support.processes import kill, wait_gone

# A child that nobody can tell by its environment, and that keeps all it can.
CHILD = """
import os, signal, socket, sys
port = socket.create_server(("127.0.0.1", 0))
name = socket.socket(socket.AF_UNIX)
name.bind("\\0of-the-child-" + str(os.getpid()))
name.listen()
file = socket.socket(socket.AF_UNIX)
file.bind(sys.argv[1] + "/socket")
memory = os.memfd_create("kept")
print("stays", os.getpid(), flush=True)
for fd in range(3):
    os.close(fd)
signal.pause()
"""
PARENT = f"""
import os, subprocess, sys, tempfile
subprocess.Popen([sys.executable, "-c", {CHILD!r}, tempfile.gettempdir()], env={{}}, start_new_session=True)
sys.stdin.read()
os._exit(0)
"""


def test_what_a_job_leaves_is_found() -> None:
    with command(sys.executable, "-c", PARENT) as job:
        pid = int(job.until("stays").split()[1])
        try:
            with pytest.raises(AssertionError, match="left behind") as caught:
                job.end()
        finally:
            kill(pid)
            assert wait_gone(pid)
    left = str(caught.value)
    for what in (rf"'process {pid}: ", "socket port ", f"socket @of-the-child-{pid}", "socket file /", "'file /",
                 rf"/memfd:kept \(deleted\) in process {pid}'"):  # fmt: skip
        assert re.search(what, left), left
