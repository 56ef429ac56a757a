"""Ranks that fail, or train for ever: fails.py mismatch | raises | trains"""

import sys

import torch

import byteps_py.torch as bps

how = sys.argv[1]
bps.init()
if how == "mismatch":
    bps.push_pull(torch.ones(3 + bps.rank()), name="w")
for step in range(sys.maxsize):
    bps.push_pull(torch.ones(3), name="w")
    if how == "raises" and step == 5 and bps.rank() == 1:
        raise ValueError("bad batch")
    if step == 0:
        print("up", flush=True)
