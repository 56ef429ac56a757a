"""Reading the states of hosted optimizers that summation servers keep in step.

    restorable   which step of what servers hold can be restored, and from whom; pure
    reader       a trainer's end: a subprocess makes the calls, because gRPC does not survive a fork
    __main__     that subprocess

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
