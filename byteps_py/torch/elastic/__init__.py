"""Elastic training: it continues after a failure from the last commit. Names as in Horovod's ``elastic``.

Start with state.py (``run``, and what is committed and restored), then read sampler.py (the samples that are left in an
epoch).

After an error of the job (HorovodInternalError) each rank leaves the job, joins it again and restores the last commit.
Then all ranks copy rank 0's state and continue. In an elastic job (``bpslaunch --elastic``) the group may change: lost
ranks are missing, new ranks may have joined. In other jobs the same ranks must all come back.
"""

from byteps_py.torch.elastic.sampler import ElasticSampler
from byteps_py.torch.elastic.state import (
    HostUpdateResult,
    ObjectState,
    State,
    TorchState,
    get_handler_registry,
    run,
    set_handler_registry,
)

__all__ = [
    "ElasticSampler",
    "HostUpdateResult",
    "ObjectState",
    "State",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]
