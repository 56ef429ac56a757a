"""What a pipeline has sent to the next stage."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.program_runner import ProgramRunner
from byteps_py.parallel.pipe.step_data import StepData
from byteps_py.parallel.pipe.transfers import ValueSent


class Done(dist.Work):
    def __init__(self) -> None:
        super().__init__()
        self.is_done = False

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self, timeout: object = None) -> bool:
        self.is_done = True
        return True


def test_memory_that_changes_while_it_is_sent_is_an_error_of_the_step() -> None:
    x = torch.zeros(4, requires_grad=True)
    output = x * 2
    kept = ValueSent([Done()], [output.detach().view(-1)])
    assert not kept.is_over
    kept.wait()
    assert kept.is_over
    changed = ValueSent([Done()], [output.detach().view(-1)])
    with torch.no_grad():
        output.add_(1)
    with pytest.raises(UsageError, match="changed its output in place while it was sent"):
        changed.wait()
    runner, data = ProgramRunner({}, [], {}, {}, 0), StepData()
    runner._sent = [kept, changed]
    runner.finish(data)
    assert isinstance(data.error, UsageError)
    with torch.inference_mode():
        ValueSent([Done()], [torch.ones(2)]).wait()
