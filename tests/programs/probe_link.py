"""Measures a link as the start of a job does. ``probe_link.py``: prints its address, and sends back what arrives until
it is killed; ``probe_link.py ADDRESS``: prints the rate in Mbit/s."""

from __future__ import annotations

import os
import sys

from byteps_py.config.settings import Settings
from byteps_py.dataplane.listener import DataListener
from byteps_py.dataplane.traffic import Traffic
from byteps_py.runtime import Runtime
from byteps_py.wire.data_link import Kind
from byteps_py.worker.io.probe import Probe

SETTINGS = Settings(num_workers=2, secret="the secret of a test")


def send_back(host: str) -> None:
    loop = Runtime().loop
    kinds = frozenset((Kind.PUSH,))
    listener = DataListener(host, SETTINGS, Traffic(), kinds, lambda *_: None, lambda _: None)
    listener.open_echo()
    listener.attach(loop)
    print(listener.address, flush=True)
    loop.run()  # until the process is killed


def measure(address: str) -> None:
    runtime = Runtime()

    def done(mbit: float) -> None:
        print(f"{mbit:.0f} Mbit/s", flush=True)
        runtime.loop.stop()

    Probe(runtime, SETTINGS, 0, address, done)
    runtime.loop.run()
    runtime.loop.close()


if __name__ == "__main__":
    if sys.argv[1:]:
        measure(sys.argv[1])
    else:
        send_back(os.environ["DMLC_NODE_HOST"])
