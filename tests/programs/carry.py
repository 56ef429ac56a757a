"""One gather, one exchange or one scattered sum, of ``BYTES``; what it carries is read from the job's report."""

from __future__ import annotations

import sys

import numpy as np

from byteps_py.session import Session, open_session
from byteps_py.tensor_codec import Codec, CodecKind
from byteps_py.tensors import DType, Layout, Op, TensorSpec

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


if __name__ == "__main__":
    joined = open_session()
    kinds = {"gather": gather, "exchange": exchange, "scatter": scatter, "coded_scatter": coded_scatter}
    kinds[sys.argv[1]](joined)
    joined.barrier(WAIT_S)
    joined.close()
