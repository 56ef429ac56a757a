"""Phrases that the messages of errors and logs share: counts, ranks, names, quoted values. Pure; any thread."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: The prefix of a job's reason to end if somebody ended it on purpose.
STOPPED = "stopped: "
_MAX_RANGES = 8
_SHOWN = 200


def count_text(number: int, noun: str) -> str:
    """A number and its noun, in the plural unless the number is 1.

    >>> count_text(1, "server"), count_text(2, "server")
    ('1 server', '2 servers')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def bytes_text(number: int) -> str:
    """A number of bytes, in a unit in which it has one to three digits before the point.

    >>> bytes_text(999), bytes_text(200_000), bytes_text(1_500_000_000)
    ('999 bytes', '200.0 KB', '1.5 GB')
    """
    size = float(number)
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 999.95:
            return f"{number} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks as ranges, long lists cut.

    >>> ranks_text([3, 0, 1, 7])
    'ranks 0-1, 3, 7'
    >>> ranks_text([4])
    'rank 4'
    """
    ordered = sorted(set(ranks))
    ranges: list[tuple[int, int]] = []
    for rank in ordered:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    shown = ", ".join(f"{low}-{high}" if high > low else f"{low}" for low, high in ranges[:_MAX_RANGES])
    hidden = sum(high - low + 1 for low, high in ranges[_MAX_RANGES:])
    return f"rank{'s' if len(ordered) != 1 else ''} {shown}" + (f" and {hidden} more" if hidden else "")


def operation_text(name: str, group: Iterable[int]) -> str:
    """How a flight recorder calls the operations of the tensor ``name`` of the ranks ``group``; of all if it is empty.

    >>> operation_text("a", ()), operation_text("a", (0, 1))
    ('a', 'a of ranks 0-1')
    """
    ranks = tuple(group)
    return f"{name} of {ranks_text(ranks)}" if ranks else name


def names_text(names: list[str], limit: int = 4) -> str:
    """Tensor names, long lists cut.

    >>> names_text(["a"]), names_text(["a", "b", "c"], limit=2)
    ("tensor 'a'", "tensors 'a', 'b' and 1 more")
    """
    shown = ", ".join(repr(name) for name in names[:limit])
    hidden = len(names) - limit
    return f"tensor{'s' if len(names) != 1 else ''} {shown}" + (f" and {hidden} more" if hidden > 0 else "")


def shown(text: str) -> str:
    """``text`` for a message: in one line, cut if it is long, and without characters that control a terminal.

    >>> shown("a\\nb")
    'a\\\\nb'
    """
    short = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
    return short if short.isprintable() else repr(short)[1:-1]


def sendable(text: str) -> str:
    """``text`` with a question mark for each character that UTF-8 can't encode: halves of surrogate pairs, into which
    Python decodes invalid bytes of file names and arguments.

    >>> sendable("a\\udcff")
    'a?'
    """
    return text.encode(errors="replace").decode()


#: The error of a program that needs PyTorch where it is not installed.
NO_TORCH = (
    "byteps_py needs PyTorch to train, and it is not installed here: pip install '.[torch]' in the source tree, as "
    "README.md says"
)

#: How names of several gradients that travel together end; see torch/gradients/gradient_reducer.py.
_TOGETHER = re.compile(r"(.+)\+(\d+) \([0-9a-f]{8}\)")


def tensor_text(name: str) -> str:
    """A tensor in messages for users.

    >>> tensor_text("w"), tensor_text("Gradient.0.weight+3 (748f081e)")
    ("tensor 'w'", "tensor 'Gradient.0.weight' and 3 more")
    """
    if (found := _TOGETHER.fullmatch(name)) is None:
        return f"tensor {name!r}"
    return f"tensor {found[1]!r} and {found[2]} more"
