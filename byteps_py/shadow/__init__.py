"""Reading the states of hosted optimizers that summation servers keep in step.

    restorable   the step of the servers' states that can be restored, and the servers to read from; pure
    reader       reads them over the servers' data planes, for a trainer or `bps checkpoint`

Trainers import this package, so it imports no gRPC.
"""

from byteps_py.shadow.reader import ShadowReader
from byteps_py.shadow.restorable import (
    NotRestorable,
    Restorable,
    RestorablePartition,
    RestorableRecord,
    ServerDescription,
    latest_step,
)

__all__ = [
    "NotRestorable",
    "Restorable",
    "RestorablePartition",
    "RestorableRecord",
    "ServerDescription",
    "ShadowReader",
    "latest_step",
]
