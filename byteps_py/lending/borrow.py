"""``python -m byteps_py.lending.borrow``: asks the pool of BYTEPS_POOL for as many servers as are of use, as long as
the job runs. bpslaunch --pool starts it beside the first machine's ranks. One thread."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from typing import NoReturn

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError
from byteps_py.lending.pool import SHARED, JobRequest
from byteps_py.lending.pool_service import ask, pool_settings
from byteps_py.scheduler import query
from byteps_py.system import log
from byteps_py.wire.launch_protocol import handle_signals

_ASK_S = 1.0
_TIMEOUT_S = 2.0


def main() -> int:
    """Ask until the job is over, or SIGTERM. Exit status 0; 2: a variable is wrong."""
    settings = Settings.from_env()
    log.configure(settings.log_level, "pool", settings.log_format, lambda: {"job": settings.job, "role": "pool"})
    try:
        pool = pool_settings(settings.pool)
    except BytePSError as error:
        log.logger.error("%s", error)
        return 2
    with handle_signals((signal.SIGTERM, signal.SIGINT), _end):
        try:
            _ask_until_over(settings, pool)
        finally:
            try:
                ask(pool, "End", {"scheduler": settings.scheduler_address}, _TIMEOUT_S)
            except BytePSError as error:
                log.logger.debug("the pool was not told that the job has ended: %s", error)
    return 0


def _end(signum: int, frame: object) -> NoReturn:
    raise SystemExit(0)


def _ask_until_over(settings: Settings, pool: Settings) -> None:
    told = {name: os.environ[name] for name in SHARED if os.environ.get(name)}
    has_run = is_silent = False
    said = ""
    while True:
        try:
            status = query.status(settings, _TIMEOUT_S)
        except BytePSError:
            if has_run:
                return
            time.sleep(_ASK_S)  # it is not up yet; bpslaunch ends this process when the job does not start
            continue
        state = query.STATE_WORDS.get(status.state, "")
        if state in ("failed", "ended"):
            return
        if state == "running":
            has_run = True
            variables = {
                **told, "DMLC_NUM_WORKER": str(status.num_workers), "DMLC_NUM_SERVER": str(status.num_servers)
            }  # fmt: skip
            workers = status.num_workers
            job = JobRequest(settings.scheduler_address, workers, workers, status.tensor_bytes, variables)
            try:
                answer = ask(pool, "Borrow", dataclasses.asdict(job), _TIMEOUT_S)
            except BytePSError as error:
                if not is_silent:
                    log.logger.warning("%s; the job goes on with the servers that it has", error)
                is_silent = True
            else:
                is_silent = False
                text = f"servers from {', '.join(answer['lenders']) or 'nobody'}: {answer['reason']}"
                if text != said:
                    log.logger.warning("%s", text)
                said = text
        time.sleep(_ASK_S)


if __name__ == "__main__":
    sys.exit(main())
