"""A CPU machine's summation server, and a network that is cut once, in a round: after the end of its input."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent.parent))  # `support`

from support.proxy import Proxy

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.client import connect
from byteps_py.server.service import Service
from byteps_py.settings import Settings


def main() -> None:
    service = Service(Settings.from_env(), pb.MACHINE_KIND_CPU, connect)
    target = urlsplit(service.address)
    proxy = Proxy((str(target.hostname), int(target.port or 0)))
    service._network.address = proxy.address  # what it registers
    print("address", proxy.address, flush=True)

    def cut() -> None:
        sys.stdin.read()
        proxy.cut_at(b"BPS1")  # the magic of a header: the next answer's

    threading.Thread(target=cut, daemon=True).start()
    try:
        sys.exit(service.run())
    finally:
        proxy.close()


if __name__ == "__main__":
    main()
