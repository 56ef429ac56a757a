"""A whole cluster in one thread and in virtual time: one seed, one run.

    ranks (real sessions) ── local.py ── services.py (the real CS and SS) ── network.py ── control.py (the real core)

The processes' own code runs as it is; what surrounds a process (time, sockets, threads, kernels, shared memory)
is put in its place by ``surroundings``. ``run`` is the one entry.
"""

from .cluster import Cluster, Report, run
from .elastic import ElasticCluster
from .world import InvariantError

__all__ = ["Cluster", "ElasticCluster", "InvariantError", "Report", "run"]
