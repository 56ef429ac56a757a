"""Two replicas of torchft over byteps_py, one of which is killed and started again.

    torchft_replicas.py                          all of it
    torchft_replicas.py REPLICA LIGHTHOUSE       one replica, until it gets SIGKILL or its input ends

Prints ``STEP PARTICIPANTS`` for each step of replica 0 in which their number is another than in the one before.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torchft.coordination import LighthouseServer

from benchmarks.torchft_ddp import Contender


def replica_main(replica: int, lighthouse: str) -> None:
    torch.set_num_threads(1)
    contender = Contender("byteps", replica, lighthouse, 1 << 20)
    images, labels = torch.rand(8, 3, 32, 32), torch.randint(10, (8,))
    while True:
        contender.step(images, labels)
        print(contender.manager.current_step(), contender.manager.num_participants(), flush=True)


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    lighthouse = LighthouseServer(bind=f"127.0.0.1:{port}", min_replicas=1, join_timeout_ms=1000)

    def start(replica: int) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, str(replica), lighthouse.address()]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def wait_for(participants: int) -> None:
        """Until replica 0 has made a step with as many."""
        assert replicas[0].stdout is not None
        while line := replicas[0].stdout.readline():
            if line.split()[1] == str(participants):
                print(line, end="", flush=True)
                return
        raise SystemExit("replica 0 has ended")

    replicas = [start(0)]
    try:
        wait_for(1)
        replicas.append(start(1))
        wait_for(2)
        replicas[1].kill()
        wait_for(1)
        replicas.append(start(1))
        wait_for(2)
    finally:
        for each in replicas:
            each.kill()
            each.wait()
        lighthouse.shutdown()
        os._exit(0 if sys.exc_info()[0] is None else 1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        replica_main(int(sys.argv[1]), sys.argv[2])
    else:
        main()
