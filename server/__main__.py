"""``python -m byteps_py.server [--gpu-machine]``: a summation server, until the job it belongs to ends."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections.abc import Iterable

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, ConfigurationError
from byteps_py.proto import control_pb2 as pb
from byteps_py.system import jobs
from byteps_py.system.log import configure, logger, print_error
from byteps_py.system.process_memory import keep_freed_memory
from byteps_py.wire.launch_protocol import handle_signals

# How much freed memory the allocator keeps for the next messages, beyond what is in flight.
_RETAINED_BYTES = 1 << 30


def main(argv: list[str] | None = None) -> int:
    """Run a summation server. Exit status: 0 the job ended in order, 1 it failed, 2 the configuration is wrong."""
    parser = argparse.ArgumentParser(prog="python -m byteps_py.server", description="byteps_py summation server")
    parser.add_argument(
        "--gpu-machine", action="store_true", help="it runs beside trainers, on machine number DMLC_WORKER_ID"
    )
    arguments = parser.parse_args(argv)
    try:
        return _serve(arguments.gpu_machine)
    except BytePSError as error:
        print_error(f"byteps_py server: {type(error).__name__}: {error}")
        return 2 if isinstance(error, ConfigurationError) else 1


def _serve(is_gpu_machine: bool) -> int:
    settings = jobs.with_local_secret(Settings.from_env())
    who = f"server of machine {settings.worker_id}" if is_gpu_machine else "server"
    machine = f"gpu-{settings.worker_id}" if is_gpu_machine else f"cpu-{socket.gethostname()}"
    facts = {"job": settings.job, "role": "server", "machine": machine}
    configure(settings.log_level, who, settings.log_format, lambda: facts)
    logger.debug("settings:\n%s", settings.describe())
    if not keep_freed_memory(_RETAINED_BYTES):
        logger.info("the allocator of this C library can't be tuned; large messages take more time")
    if settings.numa_on:
        from byteps_py.kernels.thread_pool import default_threads
        from byteps_py.topology.numa_pinning import pin_as_set

        pin_as_set(settings, None, default_threads(settings.server_threads))
    # Imported late: the allocator must be tuned before anything starts threads or loads a compiler.
    from byteps_py.prometheus import metrics, page
    from byteps_py.prometheus.metrics import SERVER
    from byteps_py.runtime import Runtime
    from byteps_py.scheduler.client import connect
    from byteps_py.server.checkpoint_starter import CheckpointStarter
    from byteps_py.server.persistent_server import PersistentServer
    from byteps_py.server.service import SummationService
    from byteps_py.server.shadow import ShadowStore

    page.check(settings)
    kind = pb.MACHINE_KIND_GPU if is_gpu_machine else pb.MACHINE_KIND_CPU

    def new_service(settings: Settings, shadows: ShadowStore | None) -> SummationService:
        runtime = Runtime()
        checkpoints = CheckpointStarter(settings, runtime.loop) if settings.shadow_dir else None
        return SummationService(settings, kind, connect, runtime, shadows, checkpoints)

    # A GPU machine's server ends with the machine's other processes: they are started together.
    server = PersistentServer(settings, 0.0 if is_gpu_machine else settings.shadow_keep_s, new_service)

    def read() -> tuple[str, pb.Statistics]:
        return server.service.address, server.service.heartbeat().statistics

    def collect() -> Iterable[metrics.MetricSample]:
        address, counted = page.on_loop(server.service.post, read)
        machine = metrics.server_machine(is_gpu_machine, settings.worker_id, address)
        return metrics.of_service(metrics.Place(settings.job, SERVER, machine), counted)

    signals = (signal.SIGTERM, signal.SIGINT)
    with (
        handle_signals(signals, lambda number, _: server.stop(f"the server got {signal.Signals(number).name}")),
        jobs.announced(settings),
        page.page_of(settings, SERVER, collect),
    ):
        return server.run()


if __name__ == "__main__":
    sys.exit(main())
