"""The logger of all processes. Each line names the process that wrote it. Any thread.

BYTEPS_LOG_FORMAT=json: each line is a JSON object, with the fields time, level, logger, job, role, machine, rank, step,
tensor and message, those that are known. `bps logs` reads both.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping

logger = logging.getLogger("byteps_py")

#: The facts of a line beside its record: names and values, the latter strings or numbers.
Facts = Mapping[str, str | int]


def configure(level: str, who: str, format: str = "text", facts: Callable[[], Facts] = dict) -> None:
    """Write this process's log to stderr, each line with ``who`` ("server 1", "rank 0") in its prefix.

    The entry point of each service calls this once. Training scripts keep their own logging configuration, unless the
    format is "json"; then lines have ``facts()`` instead of ``who``.
    """
    handler = logging.StreamHandler(sys.stderr)
    if format == "json":
        handler.setFormatter(JsonFormatter(facts))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s byteps_py {who} %(levelname)s: %(message)s", "%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel({"FATAL": "CRITICAL", "TRACE": "DEBUG"}.get(level, level))
    logger.propagate = False
    silence_grpc()


class JsonFormatter(logging.Formatter):
    """One JSON object for each record. ``facts``: those of the process that are known now. A record's ``tensor`` and
    ``step`` (``extra=about(tensor=name)``) come before them.

    >>> record = logging.LogRecord("byteps_py", logging.WARNING, "", 0, "rank %d waits", (1,), None)
    >>> print(JsonFormatter(lambda: {"job": "j1", "rank": 0}).format(record).partition(", ")[2])
    "level": "WARNING", "logger": "byteps_py", "job": "j1", "rank": 0, "message": "rank 1 waits"}
    """

    def __init__(self, facts: Callable[[], Facts]) -> None:
        super().__init__()
        self._facts = facts

    def format(self, record: logging.LogRecord) -> str:
        """The object, without an end of line."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            **self._facts(),
        }
        line |= {name: getattr(record, name) for name in ("step", "tensor") if hasattr(record, name)}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def about(tensor: str = "", step: int | None = None) -> dict[str, str | int]:
    """The ``extra`` of a record about a tensor or a step, those that are known."""
    return {**({"tensor": tensor} if tensor else {}), **({} if step is None else {"step": step})}


def print_error(text: str) -> None:
    """Write the error that ends this process to stderr, in the format of its log."""
    handler = logger.handlers[0] if logger.handlers else None
    if handler is not None and isinstance(handler.formatter, JsonFormatter):
        logger.critical("%s", text)
    else:
        print(text, file=sys.stderr)


def text_of(line: str) -> str | None:
    """A line of JsonFormatter as the other format has it; None if ``line`` is something else.

    >>> text_of('{"time": "2026-01-31T12:00:01.500Z", "level": "INFO", "role": "rank", "rank": 3, "message": "hello"}')
    '12:00:01 byteps_py rank 3 INFO: hello'
    """
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
        at, level, message = (str(found[name]) for name in ("time", "level", "message"))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    who = " ".join(str(found[name]) for name in ("role", "machine", "rank") if name in found)
    if found.get("role") == "rank":
        who = f"rank {found.get('rank', '?')}"
    also = "".join(f" [{name} {found[name]}]" for name in ("step", "tensor") if name in found)
    exception = f"\n{found['exception']}" if "exception" in found else ""
    return f"{at[11:19]} byteps_py {who} {level}: {message}{also}{exception}"


def silence_grpc() -> None:
    """Call it before gRPC is imported. gRPC logs each failed handshake on stderr; those that matter are raised as
    errors with more to say."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
