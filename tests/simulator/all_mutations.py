"""Every way in which a core is broken on purpose, and in which kind of job that shows."""

from __future__ import annotations

from .accumulating import AccumulatingOutageCluster
from .accumulating_mutations import ACCUMULATING_MUTATIONS
from .busy import BusyCluster
from .cluster import Cluster
from .coded import CodedCluster
from .coded_mutations import CODED_MUTATIONS
from .elastic import ElasticCluster
from .elastic_mutations import ELASTIC_MUTATIONS
from .hosted import HostedCluster, HostedCodedCluster, HostedElasticCluster
from .hosted_mutations import HOSTED_CODED_MUTATIONS, HOSTED_ELASTIC_MUTATIONS, HOSTED_MUTATIONS
from .in_place import InPlaceCluster
from .in_place_mutations import IN_PLACE_MUTATIONS
from .links import LinksCluster
from .mutations import LINKS_MUTATIONS, MUTATIONS
from .outage_mutations import BUSY_MUTATIONS, ELASTIC_OUTAGE_MUTATIONS, OUTAGE_MUTATIONS
from .outages import ElasticOutageCluster, OutageCluster
from .parts import Parts
from .peer_mutations import PEER_MUTATIONS
from .pipeline_mutations import PIPELINE_MUTATIONS
from .shadow_mutations import (
    SHADOW_CODED_MUTATIONS,
    SHADOW_COPIES_MUTATIONS,
    SHADOW_MUTATIONS,
    SHADOW_OUTAGE_MUTATIONS,
)
from .shadowed import ShadowCluster, ShadowCodedCluster, ShadowCopiesCluster, ShadowOutageCluster

#: With the kind of job, and a seed that shows it.
ALL_MUTATIONS: dict[type[Parts], tuple[type[Cluster], int]] = {
    mutation: (kind, seed)
    for kind, mutations in (
        (Cluster, {**MUTATIONS, **PIPELINE_MUTATIONS, **PEER_MUTATIONS}),
        (LinksCluster, LINKS_MUTATIONS),
        (CodedCluster, CODED_MUTATIONS),
        (AccumulatingOutageCluster, ACCUMULATING_MUTATIONS),
        (ElasticCluster, ELASTIC_MUTATIONS),
        (OutageCluster, OUTAGE_MUTATIONS),
        (ElasticOutageCluster, ELASTIC_OUTAGE_MUTATIONS),
        (InPlaceCluster, IN_PLACE_MUTATIONS),
        (BusyCluster, BUSY_MUTATIONS),
        (HostedCluster, HOSTED_MUTATIONS),
        (HostedCodedCluster, HOSTED_CODED_MUTATIONS),
        (HostedElasticCluster, HOSTED_ELASTIC_MUTATIONS),
        (ShadowCluster, SHADOW_MUTATIONS),
        (ShadowOutageCluster, SHADOW_OUTAGE_MUTATIONS),
        (ShadowCodedCluster, SHADOW_CODED_MUTATIONS),
        (ShadowCopiesCluster, SHADOW_COPIES_MUTATIONS),
    )
    for mutation, seed in mutations.items()
}
