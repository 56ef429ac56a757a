"""FSDP2 on several machines: what the ranks of a machine have gathered stays in memory that they share.

cache_parameters   for a model, after ``fully_shard`` (parameter_cache.py)
GatherPlan         which rank receives which piece from another machine (gather_plan.py; pure)
CachedAllGather    the all-gather of one FSDP module (cached_all_gather.py)
"""

from byteps_py.parallel.fsdp.parameter_cache import ParameterCache, cache_parameters

__all__ = ["ParameterCache", "cache_parameters"]
