"""``python -m byteps_py.scheduler``, and what ``DMLC_ROLE=scheduler bpslaunch`` runs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, JournalError
from byteps_py.scheduler.job import Finish
from byteps_py.system import jobs, log
from byteps_py.system.process_memory import use_one_heap
from byteps_py.wire.launch_protocol import NO_JOURNAL_STATUS, UNUSABLE_STATUS


def main() -> int:
    """Serve one job as the environment says. Exit status: 0 the job ended in order, 1 it failed, 2 it could not start,
    78 its journal can't be kept."""
    use_one_heap()
    try:
        settings = Settings.from_env()
        facts = {"job": settings.job, "role": "scheduler"}
        log.configure(settings.log_level, "scheduler", settings.log_format, lambda: facts)
        finish = asyncio.run(_serve(settings))
    except OSError as error:
        log.print_error(f"byteps_py scheduler: the report (BYTEPS_REPORT) can't be written: {error}")
        return UNUSABLE_STATUS
    except JournalError as error:
        log.print_error(f"byteps_py scheduler: {error}")
        return NO_JOURNAL_STATUS
    except BytePSError as error:
        log.print_error(f"byteps_py scheduler: {error}")
        return UNUSABLE_STATUS
    return finish.exit_status  # the reason of a failure is in the log


async def _serve(settings: Settings) -> Finish:
    from byteps_py.prometheus import metrics, page
    from byteps_py.prometheus.metrics import SCHEDULER
    from byteps_py.scheduler.query import to_dict  # not above: gRPC is imported once its log is configured
    from byteps_py.scheduler.service import SchedulerService, listening_address

    page.check(settings)
    service, loop = SchedulerService(settings), asyncio.get_running_loop()

    def collect() -> Iterable[metrics.MetricSample]:
        return metrics.of_status(settings.job, page.on_loop(loop.call_soon_threadsafe, service.status))

    host = listening_address(settings)[0] if settings.metrics_port else ""
    with jobs.announced(settings), page.page_of(settings, SCHEDULER, collect, host):
        finish = await service.run()
    if settings.report:
        Path(settings.report).write_text(json.dumps(to_dict(service.status()), indent=2))
    return finish


if __name__ == "__main__":
    sys.exit(main())
