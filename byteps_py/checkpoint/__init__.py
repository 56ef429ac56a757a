"""`bps checkpoint`: writes the states of a training that summation servers hold to disk, while the training goes on.

    stored_state   the state_dict of a step; its tensors stay on the servers until they are written
    writer         one checkpoint, in the format of torch.distributed.checkpoint
    program        when one is written, and which are kept

Needs torch. The folder of checkpoints is byteps_py/checkpoint_files.py, which needs none.
"""
