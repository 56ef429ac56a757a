"""A training process's side of the service: declare tensors, hand them over, wait. Knows no torch."""

from byteps_py.session.base import HostedPart, Observer, Session, ShadowedStep, Slot
from byteps_py.session.service.starting import open_session

__all__ = ["HostedPart", "Observer", "Session", "ShadowedStep", "Slot", "open_session"]
