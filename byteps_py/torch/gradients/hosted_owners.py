"""Which hosted optimizer has a parameter: one at a time, because its service has the parameter's master.

The training thread calls.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from byteps_py.errors import UsageError

#: Of a parameter: a weak reference to what has it. A parameter may outlive its optimizer, and the reverse.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def claim(named: Sequence[tuple[str, torch.nn.Parameter]], owner: object) -> None:
    """Give ``owner`` the parameters until it is gone. Raises UsageError if another one has one of them."""
    if any(_other(param, owner) for _, param in named):
        gc.collect()  # an optimizer that is not used any more may be part of a cycle
    for name, param in named:
        if _other(param, owner):
            raise UsageError(
                f"hosted=True: parameter {name!r} belongs to another hosted optimizer already: its service has the "
                "parameter's states, and both would change it. Use one optimizer with several param_groups, or delete "
                "the other one first (del optimizer)"
            )
    for _, param in named:
        _owners[param] = weakref.ref(owner)


def _other(param: torch.nn.Parameter, owner: object) -> bool:
    reference = _owners.get(param)
    return reference is not None and reference() not in (None, owner)
