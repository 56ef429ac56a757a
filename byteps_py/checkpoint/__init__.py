"""`bps checkpoint`: writes the states of a training that summation servers hold to disk, while the training goes on.

``program`` says when a checkpoint is written, and which are kept, and writes it; tensors stay on the servers until
then. Needs torch. The folder of checkpoints is byteps_py/checkpoint_files.py, which needs none.
"""
