"""The schedules, by name: each is a function of the number of workers and of micro-batches that returns a Program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.program import Program
from byteps_py.parallel.pipe.schedules.chimera import chimera
from byteps_py.parallel.pipe.schedules.dapple import dapple
from byteps_py.parallel.pipe.schedules.gems import gems
from byteps_py.parallel.pipe.schedules.gpipe import gpipe
from byteps_py.parallel.pipe.schedules.interleaved import interleaved
from byteps_py.parallel.pipe.schedules.options import More, WarmUp
from byteps_py.parallel.pipe.schedules.pipedream import pipedream, pipedream_2bw

__all__ = ["More", "WarmUp", "chimera", "dapple", "gems", "gpipe", "interleaved", "make", "pipedream", "pipedream_2bw"]


class _Schedule(NamedTuple):
    """``options``: the parameters after the number of workers and micro-batches, by the name of the option."""

    function: Callable[..., Program]
    options: dict[str, str]


SCHEDULES = {
    "gpipe": _Schedule(gpipe, {}),
    "dapple": _Schedule(dapple, {"warmup": "warm_up"}),
    "interleaved": _Schedule(interleaved, {"chunks": "chunks", "consecutive": "consecutive"}),
    "chimera": _Schedule(chimera, {"pipes": "pipes", "more": "more"}),
    "gems": _Schedule(gems, {}),
    "pipedream": _Schedule(pipedream, {}),
    "pipedream-2bw": _Schedule(pipedream_2bw, {}),
}
#: The field's other names.
ALIASES = {"1f1b": "dapple"}
#: Carried out by torch, which makes their lists of actions (torch_schedules.py).
OF_TORCH = ("zero-bubble", "zb-v", "dualpipev")


def make(name: str, workers: int, micro_batches: int, **options: Any) -> Program:
    """The schedule ``name`` with the options of `bps schedule`: ``chunks``, ``consecutive``, ``pipes``, ``more``
    ("direct", "doubling" or "halving") and ``warmup`` ("A" or "B"). "1f1b" is dapple. Raises UsageError.

    >>> make("chimera", 4, 8, more="doubling").warmup
    (3, 4, 4, 3)
    >>> make("1f1b", 4, 8).name
    'dapple'
    """
    name = ALIASES.get(name.lower(), name)
    if name in OF_TORCH:
        raise UsageError(
            f"{name} is one of torch's schedules, and torch makes its lists of actions: bps.parallel.Pipeline takes "
            f"it, and `bps schedule` does not draw it; it draws {', '.join(SCHEDULES)}"
        )
    schedule = SCHEDULES.get(name)
    if schedule is None:
        ours = ", ".join(each if each != "dapple" else "dapple (also called 1f1b)" for each in SCHEDULES)
        raise UsageError(
            f"there is no schedule {name!r}; there are {ours}, and in a Pipeline torch's {', '.join(OF_TORCH)}"
        )
    if unknown := sorted(set(options) - set(schedule.options)):
        known = ", ".join(schedule.options) or "none"
        raise UsageError(f"the schedule {name} has no option {unknown[0]}; its options: {known}")
    for what, count in {"workers": workers, "micro-batches": micro_batches, **options}.items():
        if isinstance(count, int) and count < 1:
            raise UsageError(f"{what}: {count} is not possible; at least 1 is needed")
    arguments = {schedule.options[option]: _value(option, value) for option, value in options.items()}
    return schedule.function(workers, micro_batches, **arguments)


def _value(option: str, value: Any) -> Any:
    kind = {"more": More, "warmup": WarmUp}.get(option)
    if kind is None or isinstance(value, kind):
        return value
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(each.value) for each in kind)
        raise UsageError(f"{option}={value!r} is not possible; it is one of {names}") from None
