"""A CPU machine's summation server, and a network that does what each line of its input says, once: ``cut`` (an answer
is lost with its connection), ``flip up`` (a bit of a contribution's header), ``flip down`` (of an answer's), ``lose N``
(one in twenty of whatever is on its way, a handshake's, too, each with its connection; N times).

It says so when it has done it, and goes on without faults at the end of its input.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent.parent))  # `support`

from support.damage import Flipper, Loser
from support.proxy import Proxy

from byteps_py.config.settings import Settings
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.scheduler.client import connect
from byteps_py.server.service import SummationService
from byteps_py.system.log import configure
from byteps_py.wire.data_link import VERSION, Kind

_PUSH, _ANSWER = (b"BPS1" + bytes((VERSION, kind)) for kind in (Kind.PUSH, Kind.ANSWER))  # how a header begins
_AFTER = 30  # in the middle of its key


def main() -> None:
    settings = Settings.from_env()
    configure(settings.log_level, "server")
    service = SummationService(settings, pb.MACHINE_KIND_CPU, connect, Runtime())
    target = urlsplit(service.address)
    proxy = Proxy((str(target.hostname), int(target.port or 0)))
    service._network.address = proxy.address  # what it registers
    print("address", proxy.address, flush=True)

    def obey() -> None:
        for line in sys.stdin:
            what = line.strip()
            if what == "cut":
                proxy.has_cut.clear()
                proxy.cut_at(_ANSWER)
                proxy.has_cut.wait()
            elif what.startswith("lose "):
                loser = proxy.alter = Loser(0.05, int(what.removeprefix("lose ")))
                loser.has_lost.wait()
            else:
                is_up = what == "flip up"
                flipper = proxy.alter = Flipper(is_up, 1, _PUSH if is_up else _ANSWER, _AFTER)
                flipper.has_flipped.wait()
            # The next fault hits something else than what is being said again.
            passing = proxy.alter = Flipper(False, 0, _ANSWER)
            for _ in range(20):
                passing.passed.acquire()
            print("done:", what, flush=True)

    threading.Thread(target=obey, daemon=True).start()
    try:
        sys.exit(service.run())
    finally:
        proxy.close()


if __name__ == "__main__":
    main()
