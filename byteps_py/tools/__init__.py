"""The tools that `bps` runs beside training: it plans, simulates and compares, and no training step needs it.

numerics          where a run differs from a reference, and what sums lose in bfloat16 (`bps numerics`)
plan              how large each dimension of a mesh should be, and the memory of states (`bps plan`)
schedule_chart    charts of a pipeline schedule (`bps schedule`)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from byteps_py.lazy_imports import import_lazily

if TYPE_CHECKING:
    from byteps_py.tools import numerics as numerics, plan as plan, schedule_chart as schedule_chart

import_lazily(__name__)
