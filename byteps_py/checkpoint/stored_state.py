"""The state_dict of a step that servers hold. Its large tensors stay there: a WholeTensor reads them in pieces.

    {"model": {name: parameter or buffer},
     "optimizer": {"state": {name: {"step": …, "exp_avg": …, "master_param": …}},
                   "param_groups": [{"lr": …, "params": [name, …]}]},
     "step": N,
     "calls": of step(), which makes no step if gradients are not finite,
     "extra": {rank: the user's attachment, pickled},
     "buffers": {rank: {name: buffer}},     of ranks whose buffers differ from rank 0's
     "constants": {name: digest}}           of large buffers that are as the program has made them, and not in "model"

That is the layout of torch.distributed.checkpoint.state_dict.get_state_dict. The names are those that parameters have
in the model. States are those of the optimizer's state_dict: a parameter of 16 bits has "master_param" beside them.
One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from byteps_py.errors import ProtocolError, UsageError
from byteps_py.shadow import Restorable, ShadowReader
from byteps_py.shadow.record import Attachment, StoredBuffer
from byteps_py.torch.gradients.hosted.replication import tensors_of
from byteps_py.torch.gradients.whole_state import WholeTensor, held_state

#: The keys of each rank's attachment in the checkpoint.
EXTRA, BUFFERS = "extra", "buffers"
CONSTANTS = "constants"


def stored_state(
    reader: ShadowReader, found: Restorable, before_read: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The state_dict of a step. ``before_read``: called before the attachments of ranks are read. Raises ProtocolError
    if its records are damaged, and as ShadowReader.read_attached does."""
    try:
        state = _stored_state(reader, found)
        _add_attachments(state, reader, found, before_read)
        return state
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"the record of step {found.step} is damaged: {error!r}") from error


def whole_tensors(state: Mapping[str, Any]) -> Iterator[WholeTensor]:
    """The tensors in ``state`` that are yet to be read."""
    for value in state.values():
        if isinstance(value, WholeTensor):
            yield value
        elif isinstance(value, dict):
            yield from whole_tensors(value)


def _stored_state(reader: ShadowReader, found: Restorable) -> dict[str, Any]:
    if found.commons.keys() != {()}:
        groups_text = ", ".join(str(list(ranks)) for ranks in found.commons)
        raise UsageError(
            f"the states of step {found.step} are of a model in parts, which ranks {groups_text} hold, and `bps "
            "checkpoint` writes those of a whole one: save it with parallel.checkpoint, or restore the job"
        )
    common = found.common
    model: dict[str, Any] = {}
    states: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    names: dict[str, list[str]] = common["names"]  # of those that the model knows by another name, or by several
    for given in common["params"]:
        held, known_as = held_state(reader, found, given), names.get(given, [given])
        model.update(dict.fromkeys(known_as, held.parameter))
        if entries := held.entries:
            states[known_as[0]] = entries
    order = list(common["params"])
    for group, members in zip(common["groups"], common["members"], strict=True):
        numbers = {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
        params = [names.get(order[place], [order[place]])[0] for place in members]
        groups.append({**numbers, "params": params})
    optimizer = {"state": states, "param_groups": groups}
    return {"model": model, "optimizer": optimizer, "step": found.step, "calls": common.get("calls", found.step)}


def _add_attachments(
    state: dict[str, Any], reader: ShadowReader, found: Restorable, before_read: Callable[[], None]
) -> None:
    """One rank after the other: most have the same buffers, which are kept once."""
    first: Mapping[str, StoredBuffer] = {}
    extras: dict[str, bytes] = {}
    others: dict[str, dict[str, torch.Tensor]] = {}
    for rank, record in sorted(found.records.items()):
        before_read()
        attached = Attachment.unpack(reader.read_attached(record))
        if attached.extra:
            extras[str(rank)] = attached.extra
        if not rank:
            first = attached.buffers
            state["model"].update(tensors_of(first))
            if attached.constants:
                state[CONSTANTS] = dict(attached.constants)
        elif attached.buffers != first:
            others[str(rank)] = tensors_of(attached.buffers)
    if extras:
        state[EXTRA] = extras
    if others:
        state[BUFFERS] = others
