"""Process groups whose sums travel compressed (programs/group_compressed.py)."""

from __future__ import annotations

import copy
import re
import sys
from datetime import timedelta
from typing import Any

import pytest
from support.breaking import command
from support.clusters import ROOT

import byteps_py as bps
from byteps_py.errors import UsageError

PROGRAM = ROOT / "tests" / "programs" / "group_compressed.py"
CASES = re.findall(r"^@case\ndef (\w+)\(", PROGRAM.read_text(), re.MULTILINE)
LAUNCH = (sys.executable, "-m", "byteps_py.launch")
C = bps.Compression


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        ("-np 1 --machines 2", ["int8"]),
        pytest.param("-np 2 --machines 2 --servers 1", CASES, marks=pytest.mark.slow),
    ],
)
def test_like_one_process(layout: str, cases: list[str]) -> None:
    words = layout.split()
    with command(*LAUNCH, *words, sys.executable, str(PROGRAM), *cases) as job:
        assert job.end() == 0, job.text
    for case in cases:
        assert job.text.count(f"{case}: right") == int(words[1]) * int(words[3]), job.text


@pytest.mark.parametrize(
    ("compression", "said"),
    [
        (C.with_error_feedback(C.int8), r"int8 with error feedback keeps what was not sent of a tensor"),
        (C.with_momentum(C.onebit()), r"a group's tensors have no names"),
        (C.thc(), r"thc with error feedback keeps"),
        (C.bf16, r"compression BF16Compressor is a dtype: give the group tensors of that dtype"),
        (C.powersgd(), r"is for the gradients of DistributedOptimizer"),
        (C.with_warmup(C.int8, 2), r"by rules, or with a warm-up"),
        ("int8", r"must be one of bps\.Compression"),
    ],
)
def test_refused(compression: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        bps.ProcessGroupOptions(compression=compression)


def test_torch_copies_options() -> None:
    options = bps.ProcessGroupOptions(timedelta(seconds=7), {"compressor": "topk", "k": 0.1})
    copied = copy.deepcopy(options)
    assert copied.compression is options.compression is C.topk(0.1)
    assert copied._timeout == timedelta(seconds=7)
