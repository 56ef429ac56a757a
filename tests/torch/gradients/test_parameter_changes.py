"""parameter_compression: hosted optimizers whose parameters travel as what a step changes, in 8 bits
(programs/parameter_changes.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.clusters import bpslaunch
from support.coded_sums import scaled
from support.threaded import ThreadedCluster

import byteps_py.torch as bps
from byteps_py.codecs import Coding, decode_change, encode_change
from byteps_py.tensor_codec import CHANGES
from byteps_py.tensors import DType, Op, TensorSpec

PROGRAM = Path(__file__).parents[2] / "programs" / "parameter_changes.py"
C = bps.Compression


def right(layout: str, *cases: str, **environ: str) -> None:
    ranks, machines, servers = layout.split()
    done = bpslaunch(
        ["-np", ranks, "--machines", machines, "--servers", servers],
        [PROGRAM, *cases],
        BYTEPS_MIN_COMPRESS_BYTES="0",
        BYTEPS_FUSION_BYTES="0",
        BYTEPS_PARTITION_BYTES=str(16 << 10),
        **environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == int(ranks) * int(machines), done.stdout


def test_like_one_process() -> None:
    right("1 2 0", "plain")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2 2 1", pytest.param("1 3 0", marks=pytest.mark.long)])
def test_each_case_is_like_one_process(layout: str) -> None:
    right(layout)


def test_what_one_code_lacks_is_in_the_next_one() -> None:
    generator = torch.Generator().manual_seed(0)
    master, count = torch.randn(1000, generator=generator), 1000
    results = [np.zeros(count, np.float32) for _ in range(3)]
    coding = Coding(CHANGES, DType.FLOAT32, count)
    code = np.zeros(CHANGES.coded_nbytes(count), np.uint8)
    seen = torch.zeros(count)
    for _ in range(4):
        values = master.numpy().copy()
        encode_change(coding, values.ctypes.data, [each.ctypes.data for each in results[:2]], code.ctypes.data)
        decode_change(coding, code.ctypes.data, [results[2].ctypes.data])
        seen += scaled(CHANGES.kind, master - seen)
        for each in results:
            assert torch.equal(torch.from_numpy(each), seen)
    assert torch.allclose(seen, master, rtol=0, atol=1e-6)


def made(
    compression: Any = C.int8, dtype: torch.dtype = torch.float32, kind: Any = torch.optim.SGD, **how: Any
) -> None:
    parameter = torch.nn.Parameter(torch.ones(5, dtype=dtype))
    how = {"hosted": "sharded", **how}
    bps.DistributedOptimizer(kind([parameter], 0.1), [("w", parameter)], parameter_compression=compression, **how)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"hosted": False}, r"it is for hosted='sharded': give hosted='sharded', or leave it out"),
        ({"hosted": "machine"}, r"with hosted='machine' no parameters travel"),
        ({"shadow": True}, r"does not go together with shadow=True"),
        ({"kind": bps.optim.LAMB}, r"does not go together with LAMB"),
        ({"delayed_update_after": 2}, r"does not go together with delayed_update_after"),
        ({"dtype": torch.bfloat16}, r"is for float32 parameters, and 'w' is bfloat16"),
        ({"compression": C.float8}, r"travels as int8, not as float8_e4m3"),
        ({"compression": C.with_error_feedback(C.int8)}, r"not as int8 with error feedback"),
        ({"compression": C.bf16}, r"For 16 bits, let the model have parameters of bfloat16"),
        ({"compression": C.powersgd()}, r"is for the gradients of DistributedOptimizer"),
    ],
    ids=str,
)
def test_refused(how: dict[str, Any], said: str) -> None:
    how = dict(how)
    compression = how.pop("compression", C.int8)
    bps.init()
    try:
        with pytest.raises(bps.UsageError, match=said):
            made(compression, **how)
    finally:
        bps.shutdown()


def test_restarts() -> None:
    """Without a shadow all ranks are started again."""

    def main(rank: int) -> None:
        made()

    ThreadedCluster(elastic=True, max_restarts=1).run(main)

    def elastic(rank: int) -> None:
        with pytest.raises(bps.UsageError, match=r"does not go together with --elastic, where ranks must have"):
            made()

    ThreadedCluster(elastic=True).run(elastic)


def test_specs() -> None:
    owned: dict[str, Any] = {"ownership": "g", "codec": CHANGES}
    spec = TensorSpec("p", DType.FLOAT32, (1000,), Op.BROADCAST, **owned)
    assert (spec.nbytes, spec.sent_nbytes) == (4000, 1040)
    for wrong in (
        {"dtype": DType.BFLOAT16, **owned},
        {"is_replicated": True, **owned},
        {"ownership": "g", "codec": C.float8.codec},
    ):
        with pytest.raises(bps.UsageError, match=r"is for sums and averages that all machines get"):
            TensorSpec("p", wrong.pop("dtype", DType.FLOAT32), (1000,), Op.BROADCAST, **wrong)
