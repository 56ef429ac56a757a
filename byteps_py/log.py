"""One logger for all processes. Each line says which process speaks."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("byteps_py")


def configure(level: str, who: str) -> None:
    """Send this process's log to stderr, each line prefixed with ``who`` ("server 1", "rank 0").

    Called once by each program's entry point; a library user's own logging set-up is left alone.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s byteps_py {who} %(levelname)s: %(message)s", "%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel({"FATAL": "CRITICAL", "TRACE": "DEBUG"}.get(level, level))
    logger.propagate = False
