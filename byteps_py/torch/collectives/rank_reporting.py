"""How a rank tells others about itself beside its communication service: its metrics page, its log as JSON, and its
waits as ranges of torch.profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from byteps_py.config.settings import Settings
from byteps_py.session import Session
from byteps_py.system import log

if TYPE_CHECKING:
    from byteps_py.prometheus.page import MetricsPage
    from byteps_py.prometheus.samples import MetricSample


def open_page(settings: Settings, session: Session) -> MetricsPage | None:
    """The metrics page of the rank of ``session``; None if its port can't be used. Raises ConfigurationError without
    prometheus-client."""
    # Not above: few ranks have a page, and protobuf and the HTTP server take a while to import.
    from byteps_py.prometheus import page
    from byteps_py.prometheus.metrics import RANK
    from byteps_py.prometheus.samples import Place, gpu_machine, of_progress
    from byteps_py.proto import control_pb2 as pb

    page.check(settings)
    place = Place(settings.job, RANK, gpu_machine(session.machine_index), str(session.rank))

    def collect() -> Iterable[MetricSample]:
        return of_progress(place, pb.RankProgress(rank=session.rank, **session.progress.facts(session.result_bytes)))

    return page.open_page(settings, RANK, collect)


def profile_wait(waiting_for: Callable[[], str]) -> contextlib.AbstractContextManager[object]:
    """A range of torch.profiler while this thread waits, if it is profiled. ``waiting_for`` says what is shown as its
    argument with ``record_shapes=True``."""
    if not torch._C._autograd._profiler_enabled():
        return contextlib.nullcontext()
    return torch.autograd.profiler.record_function("byteps::wait", waiting_for())


def log_as_json(settings: Settings, session: Session) -> None:
    """Let this process write the log of this package to stderr, one JSON object a line."""
    machine, rank = f"gpu-{session.machine_index}", session.rank

    def facts() -> log.Facts:
        return {"job": settings.job, "role": "rank", "machine": machine, "rank": rank, "step": session.progress.steps}

    log.configure(settings.log_level, f"rank {rank}", "json", facts)
