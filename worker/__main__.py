"""``python -m byteps_py.worker``: the communication service of this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable

from byteps_py.config import tuning
from byteps_py.config.settings import Settings, ignored_variables
from byteps_py.errors import BytePSError, ConfigurationError
from byteps_py.proto import control_pb2 as pb
from byteps_py.system import jobs, log
from byteps_py.system.jobs import TOKEN_VARIABLE
from byteps_py.system.process_memory import keep_freed_memory
from byteps_py.wire.launch_protocol import handle_signals


def main(argv: list[str] | None = None) -> int:
    """Returns 0 after an orderly end, 1 when the job failed, 2 for a configuration error."""
    parser = argparse.ArgumentParser(prog="python -m byteps_py.worker", description=__doc__)
    parser.add_argument("--stay", action="store_true", help="go on when all ranks have left: they may come back")
    arguments = parser.parse_args(argv)
    try:
        settings = jobs.with_local_secret(Settings.from_env())
        machine = f"gpu-{settings.worker_id}"
        facts = {"job": settings.job, "role": "worker", "machine": machine}
        log.configure(settings.log_level, f"worker {settings.worker_id}", settings.log_format, lambda: facts)
        if TOKEN_VARIABLE not in os.environ:  # else the launcher has said it
            for sentence in ignored_variables(os.environ):
                log.logger.warning("%s", sentence)
        if settings.numa_on:
            from byteps_py.kernels.thread_pool import default_threads
            from byteps_py.topology.numa_pinning import pin_as_set

            pin_as_set(settings, None, default_threads(settings.worker_threads))
        # numba takes half a second: after the settings' errors
        from byteps_py import arrivals
        from byteps_py.dataplane import nixl_agent
        from byteps_py.prometheus import metrics, page
        from byteps_py.prometheus.metrics import WORKER
        from byteps_py.runtime import Runtime
        from byteps_py.scheduler.client import connect
        from byteps_py.worker.service import CommunicationService

        page.check(settings)
        nixl_agent.try_rdma(settings)
        arrivals.check(settings)
        keep_freed_memory(tuning.USUAL_CREDIT_BYTES if settings.credit_bytes is None else settings.credit_bytes)
        runtime = Runtime()
        service = CommunicationService(settings, arguments.stay, connect, runtime)

        def read() -> tuple[int, pb.Heartbeat]:
            return service.machine_index, service.heartbeat()

        def collect() -> Iterable[metrics.MetricSample]:
            index, told = page.on_loop(runtime.loop.post, read)
            place = metrics.Place(settings.job, WORKER, metrics.gpu_machine(index))
            return metrics.of_member(place, told.statistics, told.progress)

        with (
            handle_signals((signal.SIGTERM, signal.SIGINT), lambda *_: service.stop()),
            jobs.announced(settings),
            page.page_of(settings, WORKER, collect),
        ):
            return service.run()
    except ConfigurationError as error:
        log.print_error(f"byteps_py worker: {error}")
        return 2
    except BytePSError as error:
        log.print_error(f"byteps_py worker: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
