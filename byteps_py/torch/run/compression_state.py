"""What a machine has not sent yet, and its momentum, of tensors whose codecs have error feedback or momentum: to save,
and to load, beside the weights. The training thread calls.

It is no part of an optimizer's ``state_dict()``: it belongs to a machine and to tensors, of whichever optimizer or
``push_pull``, and is another one on each machine, while scripts save rank 0's optimizer for all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from byteps_py.errors import UsageError
from byteps_py.session import CodedState
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import DType
from byteps_py.torch.collectives import context as contexts

__all__ = ["compression_state_dict", "load_compression_state_dict"]

_FORMAT = "byteps_py.compression 1"
_log = logging.getLogger("byteps_py")
_PARTS = ("error", "momentum", "agreed")  # in the order of Codec.state_nbytes


def compression_state_dict() -> dict[str, Any]:
    """Copies of what this rank's machine keeps for codecs with error feedback or momentum, for torch.save(): what was
    not sent yet, the momentum, the steps that machines agree on for ``thc``, and for how many rounds others have drawn;
    and of what this rank keeps for ``powersgd``: factors and errors.

    Each machine has its own, so each rank saves its own beside the weights. Of the ranks of one machine, the first one
    of a tensor's group has it; in the ``tensors`` of others are the rounds alone. torch.load() takes it with
    weights_only=True. Call it between two steps. Raises UsageError if a round of such a tensor is under way.

    >>> import byteps_py as bps
    >>> bps.init()
    >>> bps.compression_state_dict()["tensors"]
    {}
    >>> bps.shutdown()
    """
    context = contexts.current()
    session = context.session
    return {
        "format": _FORMAT,
        "rank": session.rank,
        "ranks": session.size,
        "factors": dict(pair for each in list(context.keeping_factors) for pair in each.factor_states().items()),
        "machine": session.machine_index,
        "machines": session.num_machines,
        "tensors": {name: _to_tensors(state) for name, state in session.coded_states().items()},
    }


def load_compression_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Go on with a ``compression_state_dict``: of tensors that are declared already, and of others once they are, if
    name, shape, dtype and codec are the same; a warning names those that are not. All else of this rank begins with
    zeros. Factors of ``powersgd`` are for optimizers that are there already. Call it on each rank, with what it saved,
    before the first step: codecs that draw go on only from there.

    Raises UsageError for what was saved on another machine, or in a job with another number of machines (leave it out:
    errors and momentum then begin with zeros), and if a round of such a tensor is under way.
    """
    session = contexts.current().session
    if not isinstance(state_dict, Mapping) or state_dict.get("format") != _FORMAT:
        raise UsageError(f"load_compression_state_dict(): this is no compression_state_dict() ({_FORMAT!r})")
    saved, present = state_dict["machines"], session.num_machines
    if saved != present:
        raise UsageError(
            f"load_compression_state_dict(): it was saved in a job of {saved} machines, and this one has {present}: no "
            "machine goes on with what another has not sent. Leave it out: errors and momentum then begin with zeros"
        )
    if state_dict["machine"] != session.machine_index:
        raise UsageError(
            f"load_compression_state_dict(): it is of machine {state_dict['machine']}, and rank {session.rank} is on "
            f"machine {session.machine_index}: let each rank save and load its own, in a file with its number"
        )
    factors = state_dict.get("factors", {})
    if factors and (state_dict["rank"], state_dict["ranks"]) != (session.rank, session.size):
        raise UsageError(
            f"load_compression_state_dict(): its factors are of rank {state_dict['rank']} of {state_dict['ranks']}, "
            f"and this is rank {session.rank} of {session.size}: let each rank save and load its own, in a file with "
            "its number, or leave it out on all ranks: factors and errors then begin anew"
        )
    session.set_coded_states({name: _from_tensors(name, each) for name, each in state_dict["tensors"].items()})
    _load_factors(factors)


def _load_factors(states: Mapping[str, Any]) -> None:
    taken = {key for each in list(contexts.current().keeping_factors) for key in each.load_factor_states(states)}
    if missing := sorted(set(states) - taken):
        _log.warning(
            "the factors of %d matrices begin anew, first %r: no optimizer has such a matrix, compressed in this way",
            len(missing), missing[0],
        )  # fmt: skip


def load_of_machine(of_ranks: Sequence[Mapping[str, Any] | None]) -> None:
    """Go on with what the ranks of this machine had, as they have saved it by ``compression_state_dict``; with zeros,
    and a warning, if there were more machines, or fewer."""
    session = contexts.current().session
    if len(of_ranks) == session.size and (own := of_ranks[session.rank]) is not None:
        _load_factors(own.get("factors", {}))
    there = [each for each in of_ranks if each is not None and each["tensors"]]
    if there and there[0]["machines"] != session.num_machines:
        _log.warning(
            "error feedback and momentum of codecs begin with zeros: they were saved in a job of %d machines, and this "
            "one has %d",
            there[0]["machines"], session.num_machines,
        )  # fmt: skip
        return
    states: dict[str, CodedState] = {}
    for each in there:  # all ranks know for how many rounds machines have drawn
        for name, saved in each["tensors"].items():
            state = _from_tensors(name, saved)
            state = state if each["machine"] == session.machine_index else replace(state, data=b"")
            if state.data or (state.codec.draws and name not in states):
                states[name] = state
    session.set_coded_states(states)


def _to_tensors(state: CodedState) -> dict[str, Any]:
    codec, count = state.codec, int(np.prod(state.shape, dtype=np.int64))
    sizes = [nbytes // 4 for nbytes in codec.state_nbytes(count)]
    numbers = (
        torch.frombuffer(bytearray(state.data), dtype=torch.float32) if state.data else torch.empty(0, device="cpu")
    )
    parts = numbers.split(sizes) if state.data else [numbers] * len(sizes)
    return {
        "shape": list(state.shape),
        "dtype": int(state.dtype),
        "codec": [codec.code, codec.momentum, codec.drawn],
        **{name: part.clone() for name, part in zip(_PARTS, parts, strict=True) if part.numel()},
    }


def _from_tensors(name: str, saved: Mapping[str, Any]) -> CodedState:
    """Raises UsageError for what is damaged."""
    try:
        codec = Codec.from_code(*saved["codec"])
        shape = tuple(int(each) for each in saved["shape"])
        sizes = codec.state_nbytes(int(np.prod(shape, dtype=np.int64)))
        parts = [saved[part] for part, nbytes in zip(_PARTS, sizes, strict=True) if nbytes and part in saved]
        data = b"".join(part.numpy().tobytes() for part in parts)
        if len(data) != sum(sizes) and (data or not codec.draws):
            raise ValueError(f"{len(data)} bytes in the place of {sum(sizes)}")
        return CodedState(shape, DType(saved["dtype"]), codec, data)
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise UsageError(
            f"load_compression_state_dict(): what is said of tensor {name!r} is damaged: {error}. Save it again with "
            "compression_state_dict()"
        ) from error
