"""The state_dict of a step that servers hold. Its large tensors stay there: ``StoredTensor`` reads them in pieces.

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

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from byteps_py.errors import ProtocolError
from byteps_py.kernels.update_rules import Method
from byteps_py.shadow import Restorable, ShadowReader
from byteps_py.shadow.record import Attachment, StoredBuffer
from byteps_py.torch.gradients.hosted.replication import dtype_named, tensors_of
from byteps_py.torch.gradients.hosted.rules import MASTER, counts_steps
from byteps_py.torch.gradients.hosted.states import StoredElements, stored_states

#: The keys of each rank's attachment in the checkpoint.
EXTRA, BUFFERS = "extra", "buffers"
CONSTANTS = "constants"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of ``shape`` and ``dtype`` whose ``elements``, in another dtype perhaps, are read when they are
    needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    elements: StoredElements

    @property
    def nbytes(self) -> int:
        """The number of bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def placeholder(self) -> torch.Tensor:
        """A tensor of this shape and dtype without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Indices ``start`` to ``stop`` of the first dimension. Raises as ShadowReader.read_into does."""
        shape = (stop - start, *self.shape[1:])
        row = math.prod(self.shape[1:])
        return self.elements[start * row : stop * row].to(self.dtype).view(shape)

    def whole(self) -> torch.Tensor:
        """The whole tensor."""
        return self.elements[0 : math.prod(self.shape)].to(self.dtype).view(self.shape)


@dataclass(slots=True)
class StoredState:
    """``state``: the state_dict, with a tensor on the device "meta" where a tensor is stored elsewhere. ``stored``:
    these, by their path in ``state`` joined with dots, as torch.distributed.checkpoint names them."""

    state: dict[str, Any]
    stored: dict[str, StoredTensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the tensors that are stored elsewhere."""
        return sum(tensor.nbytes for tensor in self.stored.values())

    def put(self, path: tuple[str, ...], tensor: StoredTensor) -> None:
        """Let ``state`` have the tensor at ``path``."""
        place = self.state
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = tensor.placeholder
        self.stored[".".join(path)] = tensor


def stored_state(
    reader: ShadowReader, found: Restorable, before_read: Callable[[], None] = lambda: None
) -> StoredState:
    """The state_dict of a step. ``before_read``: called before the attachments of ranks are read. Raises ProtocolError
    if its records are damaged, and as ShadowReader.read_attached does."""
    try:
        made = _stored_state(reader, found)
        _add_attachments(made.state, reader, found, before_read)
        return made
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ProtocolError):
            raise
        raise ProtocolError(f"the record of step {found.step} is damaged: {error!r}") from error


def _stored_state(reader: ShadowReader, found: Restorable) -> StoredState:
    common = found.common
    made = StoredState({"model": {}, "optimizer": {"state": {}, "param_groups": []}, "step": found.step})
    made.state["calls"] = common.get("calls", found.step)
    names: dict[str, list[str]] = common["names"]  # of those that the model knows by another name, or by several
    for given, (tensor, _, shape, dtype_name, steps) in common["params"].items():
        parts, dtype, kinds = found.tensors[tensor], dtype_named(dtype_name), stored_states(reader, found, given)
        known_as = names.get(given, [given])
        for name in known_as:
            made.put(("model", name), StoredTensor(tuple(shape), dtype, kinds[MASTER]))
        rule = parts[0].kind.rule if parts else None
        if rule is None or not (steps or rule.method is Method.ADAGRAD):
            continue  # it has no states yet
        state = made.state["optimizer"]["state"].setdefault(known_as[0], {})
        if counts_steps(rule):
            state["step"] = torch.tensor(float(steps), device="cpu")
        for kind, elements in kinds.items():
            if kind != MASTER or elements.dtype is not dtype:
                stored = StoredTensor(tuple(shape), elements.dtype, elements)
                made.put(("optimizer", "state", known_as[0], kind), stored)
    order = list(common["params"])
    for group, members in zip(common["groups"], common["members"], strict=True):
        numbers = {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
        params = [names.get(order[place], [order[place]])[0] for place in members]
        made.state["optimizer"]["param_groups"].append({**numbers, "params": params})
    return made


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
