"""The backend "byteps" of torch.distributed: ``dist.init_process_group("byteps")``.

Programs for torch.distributed then use the communication service: DistributedDataParallel, FSDP2, tensor, sequence and
pipeline parallelism, DeviceMesh, distributed checkpoints.

    byteps_process_group ┬ reduction_collectives ┬ group_base ─ options
                         └ transfer_collectives ─┘
"""
