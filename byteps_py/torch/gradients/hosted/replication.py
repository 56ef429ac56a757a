"""The steps of a hosted optimizer that other machines make as well: what ranks say of each, beside the sums.

A step's *record* has what a restarted job needs beside the states: of rank 0 the param_groups and where each
parameter's states lie, of each rank what the user has attached, and the model's buffers. The training thread calls.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from byteps_py.errors import ProtocolError, UsageError
from byteps_py.session import Session, ShadowedStep
from byteps_py.shadow import ShadowReader
from byteps_py.shadow.record import Attachment, StoredBuffer
from byteps_py.system.log import logger
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.gradients.hosted.agreement import largest
from byteps_py.torch.gradients.whole_state import dtype_named
from byteps_py.torch.operations.broadcasts import pickled
from byteps_py.wire.data_link import MAX_ATTACHED_BYTES
from byteps_py.wording import bytes_text

#: Of what is attached, for each buffer beside its elements: its name, its shape, its digest.
_BESIDE_BYTES = 4096
_RUN_BITS = 63  # it travels as an int64
#: Where buffers have more bytes than this together, those of at least so many are sent only once they change.
MANY_BYTES = 512 << 10
LARGE_BYTES = 16 << 10
_of_session: weakref.WeakKeyDictionary[Session, Callable[[], ShadowedSteps | None]] = weakref.WeakKeyDictionary()
_ALONE = (
    "shadow=True keeps copies of the optimizer's states on other machines, and this job has one GPU machine and no CPU "
    "machine"
)


def _alone_error() -> UsageError:
    return UsageError(f"{_ALONE}. Save checkpoints instead, or add a CPU machine")


def check_machines(context: Context) -> None:
    """Raises UsageError in a job that has no machine for copies. One may still come to an elastic job, which is asked
    at the first step."""
    if not context.session.has_shadow_servers and not context.settings.elastic:
        raise _alone_error()


class ShadowedSteps:
    """Counts the steps of an optimizer. ``name``: begins the names of the tensors that all ranks exchange. ``ranks``:
    that share the optimizer, () for all; the others have optimizers of their own, for other parts of the model, which
    make the same steps at the same time.

    Attributes:
        run: see ShadowPartition; 0 before ``start``.
        step: number of the latest step.
        skips: so many next calls of step() make none: the other ranks, which did not end, know that they made none.
        calls: the number of calls of step() so far, also of those that made no step, because gradients were not finite.
        extra: the object that the user attaches to the next steps.
        loop: a RunState's training loop, which attaches in place of the user; None: there is none.
        model: the module that gives parameters their names; None: unknown.
        buffers: the model's buffers, attached as well; None: there are none.
        open_reader: reads what servers hold.
        send_with: sends the record of a step in a loop with the function that it is given, and returns once other
            machines hold the step. None: the function sends, and nobody waits.
        is_repeating: a step of a body that is over is made again, and has the record that it had.
    """

    open_reader: Callable[[Context], ShadowReader] = staticmethod(
        lambda context: ShadowReader(context.settings, servers=context.session.state_host.server_addresses)
    )

    def __init__(self, name: str, ranks: tuple[int, ...] = ()) -> None:
        self.name, self.ranks = name, ranks
        self._session: Session | None = None
        self.run = 0
        self._durable, self._is_whole = 0, False
        self.step = self.calls = self.skips = 0
        self.extra: object = None
        self.loop: LoopRecords | None = None
        self.model: torch.nn.Module | None = None
        self.buffers: ModelBuffers | None = None
        self._common = CommonRecord(ranks)
        self._reader: ShadowReader | None = None
        self._packed = b""
        self._made: MadeStep | None = None
        self.send_with: Callable[[Callable[[], None]], None] | None = None
        self.is_repeating = False

    def start(self, context: Context) -> None:
        """All ranks call it, before their states are made: they agree on the number of this run."""
        if self._session is context.session:
            return
        if not context.session.has_shadow_servers:
            self._go_without(context.session)
            return
        other = _of_session.get(context.session, lambda: None)()
        if other is not None and other is not self:
            raise UsageError(
                "shadow=True: another optimizer of this job is shadowed already, and a restarted job goes on from one "
                "optimizer's steps: give all parameters to one optimizer, in param_groups"
            )
        _of_session[context.session] = weakref.ref(self)
        (self.run,) = largest(context, f"{self.name}.run", [secrets.randbits(_RUN_BITS) | 1])
        self._durable, self._is_whole = 0, False
        self._session, self._made = context.session, None

    def _go_without(self, session: Session) -> None:
        """On a machine alone. Raises UsageError unless the job has had others, and goes on without them."""
        if self._session is None:
            raise _alone_error()
        logger.warning("%s. There are no copies for now", _ALONE)
        self.run, self._session = 0, session

    @property
    def known(self) -> int:
        """The latest step that all ranks know to be held, once all states have been."""
        return self._durable if self._is_whole else 0

    @property
    def own_record(self) -> tuple[int, int, int]:
        """The numbers that ``agree`` takes: this rank's latest step whose states and record of it are held by other
        machines, negative; whether these have held all of its states, negative; the latest step whose record of it no
        machine has taken. The largest of all ranks' numbers is what all have."""
        if self._session is None:
            return 0, 0, 0
        held, is_whole = self._session.state_host.held
        return -held, -int(is_whole), self._session.state_host.refused_step  # asked for after ``held``

    def agree(self, of_all: Sequence[int]) -> None:
        """``of_all``: the largest of all ranks' ``own_record``, each. A step is durable if no later record was refused:
        ranks that hold later steps may lack that one."""
        held, is_whole, refused = -of_all[0], of_all[1] < 0, of_all[2]
        if held > refused:
            self._durable = max(self._durable, held)
        self._is_whole = self._is_whole or is_whole

    @property
    def next(self) -> ShadowedStep | None:
        """The step that is about to be made; None if there are no copies."""
        if not self.run:
            return None
        return ShadowedStep(self.run, self.step + 1, self._durable, self._is_whole)

    def go_on(self, step: int, calls: int, reader: ShadowReader | None = None) -> None:
        """Go on from a step of an earlier run, whose states ``reader`` has until they are taken over."""
        self.step, self.calls, self._reader, self._made = step, calls, reader, None

    def taken_over(self) -> None:
        """No states of an earlier run are to be read any more."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    @property
    def attached_by(self) -> str:
        """The caller that attaches, for errors."""
        return "optimizer.shadow_extra" if self.loop is None else "what RunState attaches"

    def check_extra(self) -> bytes:
        """The object that is attached, pickled. Raises UsageError if it can't be, or is too much."""
        found = self.extra if self.loop is None else self.loop.attached()
        try:
            extra = pickled(found) if found is not None else b""
        except Exception as error:  # classes of the user may raise anything
            raise UsageError(f"{self.attached_by} can't be pickled: {error}") from error
        self._check_sizes(len(extra), {})
        return extra

    def check_size(self) -> None:
        """Raises UsageError if the buffers that are known to travel are too much."""
        self._check_sizes(0, self.buffers.sizes() if self.buffers is not None else {})

    def _check_sizes(self, extra_bytes: int, sizes: Mapping[str, int]) -> None:
        total = extra_bytes + sum(sizes.values())
        if total <= MAX_ATTACHED_BYTES - _BESIDE_BYTES * (1 + len(sizes)):
            return
        most = f"{MAX_ATTACHED_BYTES >> 20} MiB"
        largest_one = max(sizes, key=lambda name: sizes[name], default="")
        if extra_bytes >= sizes.get(largest_one, 0):
            raise UsageError(
                f"{self.attached_by} has {bytes_text(extra_bytes)}, and {most} are the most, together with the "
                "model's buffers that change: they go to another machine with every step. Attach positions and random "
                "states, not data"
            )
        raise UsageError(
            f"the model's buffers that change, and {self.attached_by}, have {bytes_text(total)}, and {most} are "
            f"the most: they go to another machine with every step. The largest buffer is {largest_one!r} with "
            f"{bytes_text(sizes[largest_one])}: if it can be computed anew, register it with register_buffer(…, "
            "persistent=False)"
        )

    def prepare_record(self) -> None:
        """Pack what belongs to the next step, unless a loop does so after it. Raises UsageError if that can't be
        pickled, or is too much, or if the loop does not expect a step."""
        if self.loop is None:
            self._pack_attached()
        elif not self.is_repeating:
            self.loop.check_step(self._made is not None)

    def _pack_attached(self) -> None:
        extra = self.check_extra()
        buffers, constants = self.buffers.stored() if self.buffers is not None else ({}, {})
        self._check_sizes(len(extra), {name: len(each.data) for name, each in buffers.items()})
        self._packed = Attachment(extra, buffers, constants).pack()

    def record(self, tensors: Sequence[ShadowedTensor], groups: Sequence[Mapping[str, Any]]) -> None:
        """The step of all parts has begun. ``tensors``: all that have states. Raises UsageError for more
        parameters than a record has room for."""
        shadowed = self.next
        self.calls += 1
        self.step += 1
        if shadowed is None:
            return
        self._made = MadeStep(shadowed, tensors, groups)
        if self.loop is None:
            self._pack_common(self._made)
            self.send_record()

    @property
    def owes_record(self) -> bool:
        """A step was made whose record waits for the end of the loop's body."""
        return self._made is not None

    def complete_record(self) -> None:
        """The record that waits says what is so now. Raises UsageError, see ``prepare_record`` and ``record``."""
        self._pack_attached()
        if self._made is not None:
            self._pack_common(self._made)

    def _pack_common(self, made: MadeStep) -> None:
        session = self._session
        if session is None or session.rank != (self.ranks[0] if self.ranks else 0):
            return
        made.common = self._common.pack(made.tensors, made.groups, self.model, self.calls)
        if len(made.common) > session.state_host.max_record_bytes:
            raise UsageError(
                f"shadow=True: the names, shapes and steps of {sum(len(each.params) for each in made.tensors)} "
                f"parameters have {len(made.common)} bytes, which go to another machine with every step, and "
                f"{session.state_host.max_record_bytes} are the most"
            )

    def send_record(self) -> None:
        """Send the record that waits, as it was completed."""
        if self.loop is not None and self.send_with is not None and self._made is not None:
            self.send_with(self._send)
        else:
            self._send()

    def _send(self) -> None:
        session, made, self._made = self._session, self._made, None
        if session is not None and made is not None:
            if not made.common:  # of a step that was made again
                self._pack_common(made)
            session.state_host.record_step(made.shadowed, made.common, self._packed)


class LoopRecords(Protocol):
    """A training loop at the end of whose body a step's record is made, in place of step() itself: by then the
    schedulers have stepped, and random numbers are drawn. So a restored job begins with the next body."""

    def attached(self) -> object:
        """The present state of all that belongs to the step."""

    def check_step(self, is_second: bool) -> None:
        """Raises UsageError if no step may be made now. ``is_second``: in this body."""


@dataclass(slots=True)
class MadeStep:
    """A step whose record has yet to be sent. ``common``: of its record."""

    shadowed: ShadowedStep
    tensors: Sequence[ShadowedTensor]
    groups: Sequence[Mapping[str, Any]]
    common: bytes = b""


@dataclass(frozen=True, slots=True)
class ShadowedTensor:
    """A tensor of gradients, by its name: the parameters that it is of, with their names, the names of their states,
    the steps of each, and the number of the latest step."""

    name: str
    param_names: Sequence[str]
    params: Sequence[torch.nn.Parameter]
    states: Sequence[str]
    steps: Sequence[int]
    last_step: int


class CommonRecord:
    """The facts that are the same on all ``ranks`` of one optimizer after a step, () for all, as JSON for the record of
    the first of them (see shadow/record.py). Most of it is the same in every step, and is made once."""

    def __init__(self, ranks: tuple[int, ...] = ()) -> None:
        self._ranks = ranks
        self._known: tuple[object, ...] = ()
        self._layout = ""

    def pack(
        self,
        tensors: Sequence[ShadowedTensor],
        groups: Sequence[Mapping[str, Any]],
        model: torch.nn.Module | None,
        calls: int = 0,
    ) -> bytes:
        """``calls``: the number of calls of step(). ``model``: gives parameters that share memory several names; None:
        they have one."""
        known = (model, [tensor.params for tensor in tensors], [len(group["params"]) for group in groups])
        if not self._known or not _is_same(known, self._known):
            self._known, self._layout = known, json.dumps(_layout(tensors, groups, model))[1:]
        said = {
            "parts": [[each.name, sum(param.numel() for param in each.params), each.last_step] for each in tensors],
            "steps": {each.name: _steps(each.steps) for each in tensors},
            "groups": [_plain(group) for group in groups],
            "calls": calls,
            "ranks": list(self._ranks),
        }
        return f"{json.dumps(said)[:-1]}, {self._layout}".encode()


def _is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """The same model, lists of parameters and sizes of param_groups. A tensor's list is made once and never changed."""
    alike = one[0] is other[0] and one[2] == other[2] and len(one[1]) == len(other[1])
    return alike and all(mine is theirs for mine, theirs in zip(one[1], other[1], strict=True))


def _layout(
    tensors: Sequence[ShadowedTensor], groups: Sequence[Mapping[str, Any]], model: torch.nn.Module | None
) -> dict[str, Any]:
    in_model: dict[torch.nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False) if model is not None else ():
        in_model.setdefault(param, []).append(name)
    params: dict[str, list[Any]] = {}
    places: dict[torch.nn.Parameter, int] = {}
    names: dict[str, list[str]] = {}
    for tensor in tensors:
        first = 0
        for name, param in zip(tensor.param_names, tensor.params, strict=True):
            params[name] = [tensor.name, first, list(param.shape), str(param.dtype)]
            first += param.numel()
            places[param] = len(places)
            if (all_names := in_model.get(param, [name])) != [name]:
                names[name] = all_names
    return {
        "params": params,
        "kinds": {tensor.name: list(tensor.states) for tensor in tensors},
        "members": [[places[param] for param in group["params"] if param in places] for group in groups],
        "names": names,
    }


def _steps(steps: Sequence[int]) -> int | list[int]:
    return steps[0] if steps and steps.count(steps[0]) == len(steps) else list(steps)


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in group.items() if name != "params"}


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_number(each) for each in value]
    return value


class ModelBuffers:
    """The persistent buffers of a model, as they travel with each step.

    A large one that has not changed since the model was made, such as a mask, does not travel: the restarted program
    makes the same again, which its checksum shows. ``restored``: those that had changed before this process began.
    """

    def __init__(self, model: torch.nn.Module, restored: Iterable[str] = ()) -> None:
        self._model = model
        found, never = self._persistent(), set(restored)
        is_much = sum(buffer.nbytes for buffer in found.values()) > MANY_BYTES
        self._unchanged = {
            name: (buffer.clone(), checksum_of(buffer))
            for name, buffer in found.items()
            if is_much and buffer.nbytes >= LARGE_BYTES and name not in never
        }

    def _persistent(self) -> dict[str, torch.Tensor]:
        """By their names in the model's state_dict."""
        mine = {id(buffer) for buffer in self._model.buffers()}
        state = self._model.state_dict(keep_vars=True)
        return {name: value.detach() for name, value in state.items() if id(value) in mine}

    def sizes(self) -> dict[str, int]:
        """Bytes of those that travel, as long as no other one changes."""
        return {name: value.nbytes for name, value in self._persistent().items() if name not in self._unchanged}

    def stored(self) -> tuple[dict[str, StoredBuffer], dict[str, str]]:
        """The buffers that travel, and the checksums of the others."""
        found = self._persistent()
        for name, (first, _) in list(self._unchanged.items()):
            if name not in found or not _is_equal(found[name], first):
                del self._unchanged[name]
        constants = {name: checksum for name, (_, checksum) in self._unchanged.items()}
        return {name: _stored(value.cpu()) for name, value in found.items() if name not in constants}, constants

    def check(self, constants: Mapping[str, str]) -> None:
        """Raises UsageError if a buffer of the model is another one than that with this checksum."""
        found = self._persistent()
        for name, checksum in constants.items():
            if name not in found or checksum_of(found[name]) != checksum:
                raise UsageError(
                    f"restore(): the model's buffer {name!r} is not the one that the job began with. It is large, and "
                    "did not change, so it was not sent with the steps: make the model as in the first run"
                )


def checksum_of(buffer: torch.Tensor) -> str:
    """Equal for buffers that are equal to the bit."""
    stored = _stored(buffer.detach().cpu())
    return hashlib.sha256(f"{stored.dtype} {stored.shape} ".encode() + stored.data).hexdigest()


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    views = [each.contiguous().view(-1).view(torch.uint8) for each in (one, other)]  # NaN is equal to itself
    return torch.equal(*views)


def _stored(buffer: torch.Tensor) -> StoredBuffer:
    data = buffer.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return StoredBuffer(str(buffer.dtype), tuple(buffer.shape), data)


def tensors_of(buffers: Mapping[str, StoredBuffer]) -> dict[str, torch.Tensor]:
    """The buffers as tensors on the CPU. Raises ProtocolError if one is damaged."""
    found = {}
    for name, each in buffers.items():
        dtype = dtype_named(each.dtype)
        if len(each.data) != math.prod(each.shape) * dtype.itemsize:
            raise ProtocolError(f"buffer {name!r} of shape {list(each.shape)} has {len(each.data)} bytes")
        flat = torch.empty(len(each.data), dtype=torch.uint8, device="cpu")
        flat.numpy()[:] = memoryview(each.data)
        found[name] = flat.view(dtype).view(each.shape)
    return found
