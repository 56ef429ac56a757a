"""Finds out where a parallel run differs from a reference run, and how much a buffer gains from float32.

`recorder.py` writes what each rank computes; `comparison.py` finds the first tensor that differs; `reference_order.py`
makes one process add in the order of a parallel run; `precision.py` measures the errors of accumulation;
`gradient_accumulation.py` accumulates and reduces gradients in float32.

Classes that need torch are imported when they are first used: `bps numerics compare` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from byteps_py.lazy_imports import importer
from byteps_py.parallel.numerics.records import (
    RankLayout,
    RecordRule,
    TensorPlacement,
    context_parallel_rules,
    head_tail,
    partial,
    separate,
    sharded,
    tensor_parallel_rules,
)

if TYPE_CHECKING:
    from byteps_py.parallel.numerics.comparison import compare
    from byteps_py.parallel.numerics.gradient_accumulation import Float32Gradients
    from byteps_py.parallel.numerics.precision import accumulation_errors
    from byteps_py.parallel.numerics.recorder import Recorder
    from byteps_py.parallel.numerics.reference_order import (
        ReferenceOrder,
        apply_reference_order,
        ordered_sum,
        reference_gradients,
    )

_HOMES = {
    "Float32Gradients": "gradient_accumulation",
    "Recorder": "recorder",
    "ReferenceOrder": "reference_order",
    "accumulation_errors": "precision",
    "apply_reference_order": "reference_order",
    "compare": "comparison",
    "ordered_sum": "reference_order",
    "reference_gradients": "reference_order",
}

__all__ = [
    "Float32Gradients",
    "RankLayout",
    "RecordRule",
    "Recorder",
    "ReferenceOrder",
    "TensorPlacement",
    "accumulation_errors",
    "apply_reference_order",
    "compare",
    "context_parallel_rules",
    "head_tail",
    "ordered_sum",
    "partial",
    "reference_gradients",
    "separate",
    "sharded",
    "tensor_parallel_rules",
]


__getattr__ = importer(__name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()})
