"""How a rank tells others about itself beside its communication service: its metrics page, its log as JSON, and its
waits as ranges of torch.profiler. And how it notices the steps that it reports, whoever makes them: a training loop
with torch's DistributedDataParallel or FSDP2 has no other place that says so. DistributedOptimizer says it itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from byteps_py.config.settings import Settings
from byteps_py.session import Session
from byteps_py.system import log

if TYPE_CHECKING:
    from byteps_py.prometheus.metrics import MetricSample
    from byteps_py.prometheus.page import MetricsPage

_watching: list[Callable[[torch.optim.Optimizer], None]] = []


def watch_optimizer_steps(stepped: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call ``stepped`` after each step of any optimizer of this process, from the first call on."""
    if not _watching:
        _watching.append(stepped)
        torch_optimizer.register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
    if not hasattr(optimizer, "_stepper"):  # a DistributedOptimizer, whose own step() is not over yet
        _watching[0](optimizer)


def has_other_step_hooks() -> bool:
    """True if hooks are registered for the steps of all optimizers, beside this one."""
    post = torch_optimizer._global_optimizer_post_hooks
    return bool(torch_optimizer._global_optimizer_pre_hooks) or any(hook is not _after_step for hook in post.values())


def open_page(settings: Settings, session: Session) -> MetricsPage | None:
    """The metrics page of the rank of ``session``; None if its port can't be used. Raises ConfigurationError without
    prometheus-client."""
    # Not above: few ranks have a page, and protobuf and the HTTP server take a while to import.
    from byteps_py.prometheus import page
    from byteps_py.prometheus.metrics import RANK, Place, gpu_machine, of_progress
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
