"""A whole cluster in one thread and in virtual time: one seed, one run.

    ranks (real sessions) ── local.py ── services.py (the real CS and SS) ── network.py ── control.py (the real core)

The processes' own code runs as it is; each is given a ``SimulatedRuntime`` (time, sockets, threads, kernels, shared
memory), and is made of the classes that ``Parts`` names. ``run`` is the one entry.
"""

from .accumulating import AccumulatingCluster, AccumulatingOutageCluster
from .busy import BusyCluster
from .cluster import Cluster, Report, run
from .coded import CodedCluster, CodedOutageCluster
from .elastic import ElasticCluster
from .hosted import HostedBusyCluster, HostedCluster, HostedCodedCluster, HostedElasticCluster, HostedOutageCluster
from .in_place import InPlaceCluster
from .links import ElasticLinksCluster, HostedLinksCluster, InPlaceLinksCluster, LinksCluster, ShadowLinksCluster
from .outages import ElasticOutageCluster, OutageCluster
from .restarted import RestartedCluster
from .shadowed import ShadowCluster, ShadowCodedCluster, ShadowCopiesCluster, ShadowOutageCluster
from .world import InvariantError

#: Of job: whose machines are there from start to end; whose machines come and go; beside an unreliable network;
#: on busy machines; with optimizers that the services keep; whose processes are started again, all or each; whose
#: links become slow and fast; whose sums travel in another form; whose machines add to values in their own time.
KINDS: dict[str, type[Cluster]] = {
    "fixed": Cluster,
    "elastic": ElasticCluster,
    "outages": OutageCluster,
    "elastic-outages": ElasticOutageCluster,
    "busy": BusyCluster,
    "hosted": HostedCluster,
    "hosted-outages": HostedOutageCluster,
    "hosted-busy": HostedBusyCluster,
    "hosted-elastic": HostedElasticCluster,
    "hosted-coded": HostedCodedCluster,
    "shadow": ShadowCluster,
    "shadow-outages": ShadowOutageCluster,
    "shadow-coded": ShadowCodedCluster,
    "shadow-copies": ShadowCopiesCluster,
    "restarted": RestartedCluster,
    "in-place": InPlaceCluster,
    "links": LinksCluster,
    "hosted-links": HostedLinksCluster,
    "shadow-links": ShadowLinksCluster,
    "elastic-links": ElasticLinksCluster,
    "in-place-links": InPlaceLinksCluster,
    "coded": CodedCluster,
    "coded-outages": CodedOutageCluster,
    "accumulating": AccumulatingCluster,
    "accumulating-outages": AccumulatingOutageCluster,
}

__all__ = [
    "KINDS",
    "AccumulatingCluster",
    "AccumulatingOutageCluster",
    "BusyCluster",
    "Cluster",
    "CodedCluster",
    "CodedOutageCluster",
    "ElasticCluster",
    "ElasticLinksCluster",
    "ElasticOutageCluster",
    "HostedBusyCluster",
    "HostedCluster",
    "HostedCodedCluster",
    "HostedElasticCluster",
    "HostedLinksCluster",
    "HostedOutageCluster",
    "InPlaceCluster",
    "InPlaceLinksCluster",
    "InvariantError",
    "LinksCluster",
    "OutageCluster",
    "Report",
    "RestartedCluster",
    "ShadowCluster",
    "ShadowCodedCluster",
    "ShadowCopiesCluster",
    "ShadowLinksCluster",
    "ShadowOutageCluster",
    "run",
]
