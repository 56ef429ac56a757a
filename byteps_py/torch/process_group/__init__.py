"""The backend "byteps" of torch.distributed: ``dist.init_process_group("byteps")``.

Everything written for torch.distributed then goes through the communication service: DistributedDataParallel, FSDP2,
tensor, sequence and pipeline parallelism, DeviceMesh, distributed checkpoints. Start with group.py.
"""
