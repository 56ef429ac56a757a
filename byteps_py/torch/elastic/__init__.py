"""Training that goes on after a failure, from its last commit: Horovod's ``elastic`` under its names.

Start with running.py (what ``run`` does), then state.py (what is committed and restored), sampler.py (which samples
an epoch still has).

What this version does: after an error of the job (HorovodInternalError) that all ranks see and survive, they leave,
join again, restore the last commit, make themselves equal to rank 0 and go on. What it does not do yet: change the
membership. A rank whose process is gone is not replaced and the others do not go on without it; ``run`` then raises an
error that says so. No notice of new hosts comes, unless you call ``State.on_hosts_updated`` yourself.
"""

from byteps_py.torch.elastic.running import run
from byteps_py.torch.elastic.sampler import ElasticSampler
from byteps_py.torch.elastic.state import HostUpdateResult, ObjectState, State
from byteps_py.torch.elastic.torch_state import TorchState, get_handler_registry, set_handler_registry

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
