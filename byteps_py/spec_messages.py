"""Conversion between a TensorSpec and its message in the scheduler's protocol. Pure; any thread."""

from __future__ import annotations

from byteps_py.errors import ProtocolError, UsageError
from byteps_py.proto import control_pb2 as pb
from byteps_py.tensors import DType, NonFinite, Op, TensorSpec


def to_spec(name: str, message: pb.Spec) -> TensorSpec:
    """The spec that ``message`` describes. Raises ProtocolError if no correct member would send it."""
    try:
        return TensorSpec(
            name=name,
            dtype=DType(message.dtype),
            shape=tuple(message.shape),
            op=Op(message.op),
            average=message.average,
            root=message.root,
            priority=message.priority,
            group=tuple(message.group),
            scatters=message.scatters,
            terms=message.terms,
            nonfinite=NonFinite(message.nonfinite),
            ownership=message.ownership,
            is_shadowed=message.is_shadowed,
        )
    except (ValueError, UsageError) as error:
        raise ProtocolError(f"tensor {name[:80]!r}: {error}") from error


def to_message(spec: TensorSpec) -> pb.Spec:
    """The message that describes ``spec``."""
    return pb.Spec(
        dtype=int(spec.dtype),
        shape=spec.shape,
        op=int(spec.op),
        average=spec.average,
        root=spec.root,
        priority=spec.priority,
        group=spec.group,
        scatters=spec.scatters,
        terms=spec.terms,
        nonfinite=int(spec.nonfinite),
        ownership=spec.ownership,
        is_shadowed=spec.is_shadowed,
    )
