"""The logger of all processes. Each line names the process that wrote it. Any thread."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("byteps_py")


def configure(level: str, who: str) -> None:
    """Write this process's log to stderr, each line with ``who`` ("server 1", "rank 0") in its prefix.

    The entry point of each service calls this once. Training scripts keep their own logging configuration.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s byteps_py {who} %(levelname)s: %(message)s", "%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel({"FATAL": "CRITICAL", "TRACE": "DEBUG"}.get(level, level))
    logger.propagate = False
    silence_grpc()


def silence_grpc() -> None:
    """Call it before gRPC is imported. gRPC logs each failed handshake on stderr; those that matter are raised as
    errors with more to say."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
