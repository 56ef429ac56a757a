"""Real jobs over links of a few Mbit/s with long round trips. Machines are network namespaces with shaped links."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from support.breaking import command
from support.clusters import has_namespaces

from benchmarks.cluster.contenders import Layout, our_commands
from benchmarks.cluster.hosts import cluster

PROGRAM = Path(__file__).parents[1] / "programs" / "far_training.py"
MACHINES, MBIT, DELAY_MS = 4, 2.0, 100.0
STEPS, WIDTH = 3, 500

pytestmark = [
    pytest.mark.skipif(not has_namespaces(), reason="needs root and iproute2 (network namespaces)"),
    pytest.mark.timeout(300),
]


@pytest.mark.long
def test_gradients_of_four_sites_get_through_and_the_job_ends_in_order() -> None:
    """No connection may push others out of the queues until they count as lost, and none may be waited for at the end:
    messages are as small as what such links carry, which the start of the job has to find out."""
    with cluster([MBIT] * MACHINES, DELAY_MS) as hosts, contextlib.ExitStack() as stack:
        services, machines = our_commands(Layout(hosts), [str(PROGRAM), str(STEPS), str(WIDTH)])
        started = [
            stack.enter_context(command(*words, limit_s=200, **{**variables, "BYTEPS_LOG_LEVEL": "INFO"}))
            for words, variables in (*services, *machines)
        ]
        assert [job.end() for job in started] == [0] * len(started), started[0].text
    trained = {digest for job in started[1:] for digest in re.findall(r"trained to (\w+)", job.text)}
    assert len(trained) == 1
    for job in started[1:]:
        (partition_bytes,) = re.findall(r"epoch 1: .* partitions of at most (\d+) bytes", job.text)
        assert int(partition_bytes) <= MBIT * 1e6 / 8 * 0.1, job.text
        assert not re.search("moved|lost|made again", job.text), job.text
        before_end, _, _ = job.text.partition("trained to")
        assert "broke" not in before_end, job.text
