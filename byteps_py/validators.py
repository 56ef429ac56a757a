"""The values that a setting can have, where its type alone says too little: hosts' names, sockets' names, paths, sizes.

Owns the table from a setting to its validator, and how a value is shown in an error. Must not ask the system: that a
host is known, or a file can be written, is for whoever uses it to find out. Pure; any thread.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: An abstract address is a null byte and the name, in the 108 bytes of ``sun_path``.
MAX_SOCKET_NAME_BYTES = 107

_MAX_HOST = 253
_MAX_INTERFACE_BYTES = 15  # IFNAMSIZ, less its end
_MAX_IDENTIFIER = 2000  # several names of a launcher's go together into a job's
_MAX_PATH_BYTES = 4095  # PATH_MAX, less its end
_MAX_PART_BYTES = 255  # NAME_MAX
_MAX_COUNT = 1 << 62  # as a float, or in 64 bits, it is a number still
_SHOWN = 200

#: Python encodes a host's name as IDNA, which raises UnicodeError for empty labels and for those above 63.
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_ADDRESS_V6 = re.compile(r"(\[)?([0-9A-Fa-f:.]+)(?:%(?:[A-Za-z0-9_-]|\.(?=[A-Za-z0-9_-])){1,15})?(?(1)\])")


@dataclass(frozen=True, slots=True)
class Validator:
    """``takes``: as words; ``allows``: a value that is set."""

    takes: str
    allows: Callable[[Any], bool]


def is_host(text: str) -> bool:
    """A host's name, or an IPv4 or IPv6 address; whatever else, no resolver can know.

    >>> [is_host(text) for text in ("db_1.example", "10.0.0.1", "fe80::1%eth0", "[::1]", "../x", "http://x", "-x")]
    [True, True, True, True, False, False, False]
    """
    if len(text) > _MAX_HOST:
        return False
    if _NAME.fullmatch(text):
        return True
    address = _ADDRESS_V6.fullmatch(text)
    if address is None:
        return False
    try:
        ipaddress.IPv6Address(address[2])
    except ValueError:
        return False
    return True


def _is_interface(text: str) -> bool:
    """As the kernel sees it."""
    return (
        _size(text) <= _MAX_INTERFACE_BYTES
        and text.isprintable()
        and text not in (".", "..")
        and not any(letter in "/" or letter.isspace() for letter in text)
    )


def _is_socket_name(text: str) -> bool:
    return _size(text) <= MAX_SOCKET_NAME_BYTES and text.isprintable()


def _is_identifier(text: str) -> bool:
    return len(text) <= _MAX_IDENTIFIER and text.isprintable()


def _is_path(text: str) -> bool:
    """What the kernel would look up at all."""
    parts = text.split("/")
    return "\0" not in text and _size(text) <= _MAX_PATH_BYTES and max(map(_size, parts)) <= _MAX_PART_BYTES


def _size(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


_HOST = Validator("the name of a host (letters, digits, '-', '_' and '.', at most 253) or its IP address", is_host)
_IDENTIFIER = Validator(f"printable characters, at most {_MAX_IDENTIFIER}", _is_identifier)
_PATH = Validator(f"a path of at most {_MAX_PATH_BYTES} bytes, {_MAX_PART_BYTES} in each of its parts", _is_path)
_COUNT = Validator("a whole number from 0 to 2^62 - 1", lambda number: number < _MAX_COUNT)

#: By field of Settings. Secrets may be anything; what is not here has its range or its choices in VARIABLES.
VALIDATORS: dict[str, Validator] = {
    "scheduler_host": Validator(f"{_HOST.takes}, as MASTER_ADDR and --scheduler do in its place", is_host),
    "node_host": _HOST,
    "interface": Validator(
        f"the name of a network interface: at most {_MAX_INTERFACE_BYTES} bytes, no space, no '/'", _is_interface
    ),
    "machine_id": _IDENTIFIER,
    "job_id": Validator(f"{_IDENTIFIER.takes}, as a launcher's names for the job do in its place", _is_identifier),
    "socket_name": Validator(f"printable characters, at most {MAX_SOCKET_NAME_BYTES} bytes", _is_socket_name),
    "secret_file": _PATH,
    "journal_dir": _PATH,
    "report": _PATH,
    "timeline": _PATH,
    "trace_dir": _PATH,
    "credit_bytes": _COUNT,
    "fusion_bytes": _COUNT,
    "trace_start_step": _COUNT,
    "trace_end_step": _COUNT,
}


def refusal(field: str, name: str, value: object) -> str:
    """Why ``value`` can't be that of ``field``, which the variable ``name`` sets; empty if it can."""
    validator = VALIDATORS.get(field)
    if validator is None or value in ("", None) or validator.allows(value):
        return ""
    text = f"'{shown(value)}'" if isinstance(value, str) else shown(str(value))
    return f"{name}={text} is not valid: it takes {validator.takes}"


def shown(text: str) -> str:
    """``text`` in one line, without its end if it is long, and harmless to a terminal.

    >>> shown("a\\nb")
    'a\\\\nb'
    """
    short = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
    return short if short.isprintable() else repr(short)[1:-1]


def sendable(text: str) -> str:
    """``text`` with a question mark for what UTF-8 can't say: halves of surrogate pairs, as undecodable bytes of file
    names and arguments become.

    >>> sendable("a\\udcff")
    'a?'
    """
    return text.encode(errors="replace").decode()
