"""Jobs in which the rates of links change while they run, and the servers' shares with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from .cluster import Cluster
from .elastic import ElasticCluster
from .hosted import HostedCluster
from .in_place import InPlaceCluster
from .shadowed import ShadowCopiesCluster
from .trials import LINK, TRIALS


class LinkTrials:
    """Beside the kind of cluster that a subclass names next."""

    known_trials: ClassVar[Sequence[str]] = (*TRIALS, *[LINK] * 4)


class LinksCluster(LinkTrials, Cluster):
    """Whose machines are there from start to end."""


class HostedLinksCluster(LinkTrials, HostedCluster):
    """With optimizers that the services keep."""


class ShadowLinksCluster(LinkTrials, ShadowCopiesCluster):
    """With copies of their states on servers."""


class ElasticLinksCluster(LinkTrials, ElasticCluster):
    """Whose machines come and go."""


class InPlaceLinksCluster(LinkTrials, InPlaceCluster):
    """Whose processes are started again."""
