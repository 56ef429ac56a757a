"""A training process's side of the service: declare tensors, hand them over, wait. Knows no torch."""

from byteps_py.session.base import Observer, Session
from byteps_py.session.service.starting import open_session
from byteps_py.session.slot import ResultRate, Slot
from byteps_py.session.state_host import HostedShard, ShadowedStep, StateHost

__all__ = ["HostedShard", "Observer", "ResultRate", "Session", "ShadowedStep", "Slot", "StateHost", "open_session"]
