"""A spare machine: it waits until the job has lost a machine, and takes that one's place. One thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, ConfigurationError, RendezvousError
from byteps_py.launch.process_output import print_message
from byteps_py.scheduler import query

#: A machine that lost only its service is back before that.
PATIENCE_S = 5.0
_ASK_S = 0.5
#: A scheduler that is started again answers before that.
_SILENT_S = 30.0


def wait_for_place(environ: Mapping[str, str], pause: Callable[[float], object] = time.sleep) -> int | None:
    """The number of a machine that the job has lost and that has not come back; None once the job has ended. ``pause``
    waits for so many seconds between two looks.

    Raises ConfigurationError for a job without BYTEPS_MAX_RESTARTS, and RendezvousError if no scheduler answers for
    30 s, or for BYTEPS_START_TIMEOUT_S before the first answer.
    """
    settings = Settings.from_env({**environ, "DMLC_WORKER_ID": "0", "BYTEPS_LOCAL_RANK": "0"})
    if not settings.max_restarts:
        raise ConfigurationError("a spare machine needs bpslaunch --max-restarts, as all machines of the job have it")
    silent_until_s = time.monotonic() + settings.start_timeout_s
    missing_since_s: dict[int, float] = {}
    has_answered = False
    while True:
        now_s = time.monotonic()
        try:
            reply = query.status(settings, 5.0)
        except BytePSError as error:
            if has_answered and now_s >= silent_until_s:
                print_message(f"the job's scheduler does not answer any more, so the job has ended: {error}")
                return None
            if now_s >= silent_until_s:
                raise RendezvousError(f"a spare machine waits for a job, and there is none: {error}") from error
        else:
            if not has_answered:
                print_message(f"a spare machine of the job at {settings.scheduler_address}")
            has_answered, silent_until_s = True, now_s + _SILENT_S
            if query.STATE_WORDS.get(reply.state) in ("failed", "ended"):
                return None
            missing_since_s = {number: missing_since_s.get(number, now_s) for number in reply.missing_workers}
            for number, since_s in missing_since_s.items():
                if now_s - since_s >= PATIENCE_S:
                    print_message(f"machine {number} is lost: this one takes its place")
                    return number
        pause(_ASK_S)
