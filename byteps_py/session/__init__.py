"""A training process's side of the service: declare tensors, hand them over, wait. Knows no torch."""

from byteps_py.session.base import CodedState, HostedShard, Observer, ResultRate, Session, ShadowedStep, Slot, StateHost
from byteps_py.session.service.starting import open_session

__all__ = [
    "CodedState",
    "HostedShard",
    "Observer",
    "ResultRate",
    "Session",
    "ShadowedStep",
    "Slot",
    "StateHost",
    "open_session",
]
