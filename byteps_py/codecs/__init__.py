"""Codecs: how tensors are compressed between machines (``byteps_py.tensor_codec`` says which there are).

``encode`` makes a machine's contribution of its ranks' tensors, ``add`` a server's answer of contributions, ``decode``
the ranks' results of an answer. ``add_up`` makes a rank's piece of contributions, without a server. ``encode_change``
and ``decode_change`` are of parameters, which their owners send.
"""

from byteps_py.codecs.coding import Coding, Draw, add, add_up, decode, decode_change, encode, encode_change, prepare
from byteps_py.kernels import Report

__all__ = ["Coding", "Draw", "Report", "add", "add_up", "decode", "decode_change", "encode", "encode_change", "prepare"]
