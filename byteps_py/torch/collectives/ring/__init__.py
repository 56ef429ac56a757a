"""Large sums in shared memory: each rank of a machine adds a share of the tensor and gives the result to all others.

RingSum, RingSums (ring_sum.py) ┬ Ring             slots and control lines (byteps_py/session/peers/ring.py)
                                ├ Chunks           which part is added by which member in which step
                                ├ steps            the steps as machine instructions, which read a table (step_table.py)
                                └ adding           the additions; add_kernels.py as machine instructions
"""
