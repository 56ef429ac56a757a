"""Finds out where a parallel run differs from a reference run, and how much a buffer gains from float32.

records            what a rank computes, in files; rules that say how ranks hold tensors
recorder           writes them, from hooks of a model
comparison         finds the first tensor that differs; assembly puts tensors together that ranks hold in parts
reference_order    makes one process add in the order of a parallel run
precision          measures the errors of accumulation

Also known as ``byteps_py.parallel.numerics``. Names are imported when they are first used: `bps numerics compare` needs
no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from byteps_py.lazy_imports import import_lazily

if TYPE_CHECKING:
    from byteps_py.parallel.float32_gradients import Float32Gradients as Float32Gradients
    from byteps_py.tools.numerics.comparison import compare as compare
    from byteps_py.tools.numerics.precision import accumulation_errors as accumulation_errors
    from byteps_py.tools.numerics.recorder import Recorder as Recorder
    from byteps_py.tools.numerics.records import (
        RankLayout as RankLayout,
        RecordRule as RecordRule,
        TensorPlacement as TensorPlacement,
        context_parallel_rules as context_parallel_rules,
        head_tail as head_tail,
        partial as partial,
        separate as separate,
        sharded as sharded,
        tensor_parallel_rules as tensor_parallel_rules,
    )
    from byteps_py.tools.numerics.reference_order import (
        ReferenceOrder as ReferenceOrder,
        apply_reference_order as apply_reference_order,
        ordered_sum as ordered_sum,
        reference_gradients as reference_gradients,
    )

import_lazily(__name__)
