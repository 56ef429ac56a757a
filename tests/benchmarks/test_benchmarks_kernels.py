"""benchmarks/kernels.py, in its smallest form: it runs, and measures everybody."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "kernels.py"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="its peer is a C program")
def test_the_benchmark_measures_all_contenders(tmp_path):
    result = tmp_path / "result.json"
    only = ["--sizes", "64", "--dtypes", "bfloat16", "--inputs", "2", "--threads", "2"]
    command = [sys.executable, str(BENCHMARK), "--quick", *only, "--json", str(result)]
    ran = subprocess.run(command, timeout=100, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(result.read_text())["rows"]
    contenders = ["memcpy", "C", "reduce", "+finite", "+checksum", "+both"]
    assert [row["contender"] for row in rows] == [f"{name}, in place" for name in contenders] + contenders
    assert all(row["gb_per_s"] > 0 and row["to_memcpy"] > 0 and row["to_c"] > 0 for row in rows)
