"""A summation server for two machines, without a scheduler: prints its two addresses, and ends with its input."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # `support`

from support.data_plane import HandLink
from support.summation import SETTINGS

from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.server.service import SummationService
from byteps_py.system.log import configure


def main() -> None:
    configure("DEBUG", "server")
    link = HandLink()
    service = SummationService(SETTINGS, pb.MACHINE_KIND_GPU, link.connect, Runtime())

    def serve() -> None:
        workers = [pb.Member(machine_index=i) for i in range(2)]
        partition_bytes = SETTINGS.partition_bytes or 0
        servers = [pb.Member(address=service.address, weight=1)]
        link.say(membership=pb.Membership(epoch=1, workers=workers, servers=servers, partition_bytes=partition_bytes))
        print(service.address, link.register.local_address, flush=True)
        sys.stdin.read()
        service.stop("the test is over")

    service._loop.post(lambda: threading.Thread(target=serve, daemon=True).start())
    sys.exit(service.run())


if __name__ == "__main__":
    main()
