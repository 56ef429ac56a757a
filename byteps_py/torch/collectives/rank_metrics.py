"""A rank's metrics page."""

from __future__ import annotations

from collections.abc import Iterable

from byteps_py.config.settings import Settings
from byteps_py.prometheus import page
from byteps_py.prometheus.metrics import RANK
from byteps_py.prometheus.samples import Place, Sample, gpu_machine, of_progress
from byteps_py.proto import control_pb2 as pb
from byteps_py.session import Session


def open_rank_page(settings: Settings, session: Session) -> page.MetricsPage | None:
    """The metrics page of the rank of ``session``; None if its port can't be used. Raises ConfigurationError without
    prometheus-client."""
    page.check(settings)
    place = Place(settings.job, RANK, gpu_machine(session.machine_index), str(session.rank))

    def collect() -> Iterable[Sample]:
        return of_progress(place, pb.RankProgress(rank=session.rank, **session.progress.facts(session.result_bytes)))

    return page.open_page(settings, RANK, collect)
