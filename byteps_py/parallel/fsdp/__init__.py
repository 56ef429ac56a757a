"""FSDP2 on several machines: gathered parameters of a machine's ranks stay in memory that they share.

cache_parameters   for a model, after ``fully_shard`` (parameter_cache.py)
CachedAllGather    the all-gather of one FSDP module (parameter_cache.py)
GatheredMemory     what is gathered, and which rank receives which piece from another machine (gathered_memory.py)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from byteps_py.lazy_imports import import_lazily

if TYPE_CHECKING:
    from byteps_py.parallel.fsdp.parameter_cache import ParameterCache as ParameterCache
    from byteps_py.parallel.fsdp.parameter_cache import cache_parameters as cache_parameters

import_lazily(__name__)
