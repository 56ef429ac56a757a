"""Training that goes on after a failure, from its last commit: Horovod's ``elastic`` under its names.

Start with running.py (what ``run`` does), then object_state.py and state.py (what is committed and restored),
sampler.py (which samples an epoch still has).

After an error of the job (HorovodInternalError) ranks leave, join again, restore the last commit, make themselves equal
to rank 0 and go on. In a job that was started as an elastic one (``bpslaunch --elastic``) the group may be another one
then: without ranks that were lost, or have left, and with new ones. In others the same ranks must all come back.
"""

from byteps_py.torch.elastic.object_state import HostUpdateResult, ObjectState, State
from byteps_py.torch.elastic.running import run
from byteps_py.torch.elastic.sampler import ElasticSampler
from byteps_py.torch.elastic.state import TorchState, get_handler_registry, set_handler_registry

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
