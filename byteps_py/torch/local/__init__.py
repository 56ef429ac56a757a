"""Training over slow, long links: ranks make steps by themselves, and combine models now and then.

Start with diloco.py (all ranks combine together), then read decoupled.py (those that are in time do).
"""

from byteps_py.torch.local.decoupled import DecoupledDiLoCo
from byteps_py.torch.local.diloco import DiLoCo, Streaming

__all__ = ["DecoupledDiLoCo", "DiLoCo", "Streaming"]
