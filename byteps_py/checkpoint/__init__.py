"""`bps checkpoint`: writes the states of a training that summation servers hold to disk, while the training goes on.

    writer    one checkpoint, in the format of torch.distributed.checkpoint; tensors stay on the servers until then
    program   when one is written, and which are kept

Needs torch. The folder of checkpoints is byteps_py/checkpoint_files.py, which needs none.
"""
