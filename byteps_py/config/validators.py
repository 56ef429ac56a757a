"""The values that a setting may have, beyond its type: names of hosts and sockets, paths, sizes.

Owns the table from a setting to its validator. Must not ask the system: whether a host exists or a file can be written
is found out where it is used. Pure; any thread.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from byteps_py.wording import shown

#: An abstract address is a null byte and the name, in 108 bytes (``sun_path``).
MAX_SOCKET_NAME_BYTES = 107

_MAX_HOST = 253
_MAX_INTERFACE_BYTES = 15  # IFNAMSIZ without its null byte
_MAX_IDENTIFIER = 2000  # a job's name may consist of several names of a launcher
_MAX_PATH_BYTES = 4095  # PATH_MAX without its null byte
_MAX_PART_BYTES = 255  # NAME_MAX
_MAX_COUNT = 1 << 62  # fits in 64 bits, and in a float

#: Python encodes a host's name as IDNA, which raises UnicodeError for empty labels and for those above 63.
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_ADDRESS_V6 = re.compile(r"(\[)?([0-9A-Fa-f:.]+)(?:%(?:[A-Za-z0-9_-]|\.(?=[A-Za-z0-9_-])){1,15})?(?(1)\])")


@dataclass(frozen=True, slots=True)
class Validator:
    """``takes``: the allowed values, in words. ``allows``: whether a value that is set is allowed."""

    takes: str
    allows: Callable[[Any], bool]


def is_host(text: str) -> bool:
    """True for the name of a host and for an IPv4 or IPv6 address. A resolver can't know anything else.

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
    """The kernel's rule."""
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
    """True if the kernel would look the path up."""
    parts = text.split("/")
    return "\0" not in text and _size(text) <= _MAX_PATH_BYTES and max(map(_size, parts)) <= _MAX_PART_BYTES


def _size(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


_HOST = Validator("the name of a host (letters, digits, '-', '_' and '.', at most 253) or its IP address", is_host)
_IDENTIFIER = Validator(f"printable characters, at most {_MAX_IDENTIFIER}", _is_identifier)
_PATH = Validator(f"a path of at most {_MAX_PATH_BYTES} bytes, {_MAX_PART_BYTES} in each of its parts", _is_path)
_COUNT = Validator("a whole number from 0 to 2^62 - 1", lambda number: number < _MAX_COUNT)

#: The validators of fields of Settings. Secrets may be any text; VARIABLES has the range or the choices of fields that
#: are not here.
VALIDATORS: dict[str, Validator] = {
    "scheduler_host": Validator(f"{_HOST.takes}; so do MASTER_ADDR and --scheduler", is_host),
    "node_host": _HOST,
    "interface": Validator(
        f"the name of a network interface: at most {_MAX_INTERFACE_BYTES} bytes, no space, no '/'", _is_interface
    ),
    "machine_id": _IDENTIFIER,
    "job_id": Validator(f"{_IDENTIFIER.takes}; so does a launcher's name for the job", _is_identifier),
    "socket_name": Validator(f"printable characters, at most {MAX_SOCKET_NAME_BYTES} bytes", _is_socket_name),
    "secret_file": _PATH,
    "journal_dir": _PATH,
    "report": _PATH,
    "shadow_dir": _PATH,
    "timeline": _PATH,
    "trace_dir": _PATH,
    "credit_bytes": _COUNT,
    "fusion_bytes": _COUNT,
    "trace_start_step": _COUNT,
    "trace_end_step": _COUNT,
}


def refusal(field: str, name: str, value: object) -> str:
    """Why ``value`` is not allowed for ``field``, which the variable ``name`` sets; empty if it is allowed."""
    validator = VALIDATORS.get(field)
    if validator is None or value in ("", None) or validator.allows(value):
        return ""
    text = f"'{shown(value)}'" if isinstance(value, str) else shown(str(value))
    return f"{name}={text} is not valid: it takes {validator.takes}"
