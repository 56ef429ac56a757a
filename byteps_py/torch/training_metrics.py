"""The facts that a training loop tells about its batches, and the numbers of this rank for a logger of the script's
own.

Owns nothing: the context's Progress has the numbers. Any thread may call ``metrics``; the training thread calls
``count_batch``.
"""

from __future__ import annotations

from byteps_py.errors import UsageError
from byteps_py.torch.collectives import context as contexts

__all__ = ["count_batch", "metrics"]


def count_batch(*, tokens: int = 0, samples: int = 0) -> None:
    """Count what this rank has trained on in a batch, for its figures of tokens and samples per second.

    Call it once for each batch. The figures of all ranks are added up: of ranks that work on the same batch (in tensor,
    context and pipeline parallelism), let one count it, or each its share. Steps need no call: those of optimizers are
    noticed. Raises NotInitializedError, and UsageError for a negative number.

    >>> import byteps_py as bps
    >>> bps.init()
    >>> before = bps.metrics()["tokens"]
    >>> bps.count_batch(tokens=4096, samples=2)
    >>> bps.metrics()["tokens"] - before
    4096.0
    >>> bps.shutdown()
    """
    if tokens < 0 or samples < 0:
        raise UsageError(f"count_batch(tokens={tokens}, samples={samples}): neither can be negative")
    context = contexts.current()
    context.session  # noqa: B018  raises NotInitializedError
    context.progress.tokens += tokens
    context.progress.samples += samples


def metrics() -> dict[str, float]:
    """The numbers of this rank, by name, as its metrics page has them: for a logger of your own.

    Since the process started: steps, tokens, samples, exposed_communication_seconds (how long the training has waited
    for communication), recoveries; result_bytes in this session, 0 unless it has a metrics page (BYTEPS_METRICS_PORT).
    Of the latest step: step_seconds, last_step_timestamp_seconds. Of the last ten seconds or so: steps_per_second,
    tokens_per_second, samples_per_second, exposed_communication_ratio (of the time, from 0 to 1). Takes some
    microseconds. Raises NotInitializedError.

    >>> import byteps_py as bps
    >>> bps.init()
    >>> sorted(bps.metrics())[:3]
    ['exposed_communication_ratio', 'exposed_communication_seconds', 'last_step_timestamp_seconds']
    >>> bps.shutdown()
    """
    context = contexts.current()
    session, progress = context.session, context.progress
    rates = progress.rates()
    return {
        "steps": float(progress.steps),
        "step_seconds": progress.step_s,
        "last_step_timestamp_seconds": progress.last_step_at_s,
        "tokens": float(progress.tokens),
        "samples": float(progress.samples),
        "exposed_communication_seconds": progress.exposed_s,
        "result_bytes": float(session.result_bytes),
        "recoveries": float(progress.recoveries),
        **rates,
    }
