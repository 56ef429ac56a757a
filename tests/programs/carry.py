"""One gather, one exchange or one scattered sum, of ``BYTES``; what it carries is read from the job's report."""

from __future__ import annotations

import sys

import numpy as np

from byteps_py.session import Session, open_session
from byteps_py.tensor_codec import Codec, CodecKind
from byteps_py.tensors import NO_BOUND, DType, Layout, Op, TensorSpec

WAIT_S = 60.0
BYTES = 60_000  # of all pieces of a gather, of each rank's tensor otherwise


def gather(session: Session) -> None:
    size = session.size
    piece = BYTES // size
    (slot,) = session.declare([TensorSpec("gather", DType.UINT8, (piece, BYTES), Op.GATHER)])
    session.hand_over(slot, layout=Layout(((0, piece),), tuple((r * piece, piece) for r in range(size))))
    session.wait(slot, WAIT_S)


def exchange(session: Session) -> None:
    size = session.size
    piece = BYTES // size
    (slot,) = session.declare([TensorSpec("exchange", DType.UINT8, (BYTES, BYTES), Op.EXCHANGE)])
    ranges = tuple((r * piece, piece) for r in range(size))
    session.hand_over(slot, layout=Layout(ranges, ranges))
    session.wait(slot, WAIT_S)


def scatter(session: Session) -> None:
    (slot,) = session.declare([TensorSpec("scatter", DType.FLOAT32, (BYTES // 4,), Op.SUM, scatters=True)])
    np.frombuffer(slot.input, np.float32)[:] = 1
    session.hand_over(slot)
    session.wait(slot, WAIT_S)


def coded_scatter(session: Session) -> None:
    codec = Codec(CodecKind.INT8, error_feedback=True)
    spec = TensorSpec("coded scatter", DType.FLOAT32, (BYTES // 4,), Op.SUM, scatters=True, codec=codec)
    (slot,) = session.declare([spec])
    np.frombuffer(slot.input, np.float32)[:] = 1
    session.hand_over(slot)
    session.wait(slot, WAIT_S)
    if not np.allclose(np.frombuffer(slot.result, np.float32), session.size):
        raise SystemExit("a wrong sum")


def coded_values(session: Session) -> None:
    """A first value, and a change that all machines get together."""
    count, codec = BYTES // 4, Codec(CodecKind.INT8)
    accumulates = {"op": Op.ACCUMULATE, "staleness": NO_BOUND, "quorum": session.num_machines, "codec": codec}
    (slot,) = session.declare([TensorSpec("values", DType.FLOAT32, (count,), **accumulates)])  # type: ignore[arg-type]
    for value in (7.0, 1.0):
        np.frombuffer(slot.input, np.float32)[:] = value
        session.hand_over(slot)
        session.wait(slot, WAIT_S)
    if not np.allclose(np.frombuffer(slot.result, np.float32), 7 + session.size):
        raise SystemExit("other values")


if __name__ == "__main__":
    joined = open_session()
    kinds = {"gather": gather, "exchange": exchange, "scatter": scatter, "coded_scatter": coded_scatter}
    {**kinds, "coded_values": coded_values}[sys.argv[1]](joined)
    joined.barrier(WAIT_S)
    joined.close()
