"""Operations that have a name, and a handle until they are waited for: what the functions of Horovod and BytePS, and
the optimizers, are made of. The functions themselves, with their names and arguments, are in torch/horovod.

    reductions                               sums, averages, minima … of all ranks, or of a process set
    adasum                                   sums that leave out what gradients have in common
    gathers ─ size_headers                   allgather, alltoall
    state_broadcast, objects ─ broadcasts    parameters, optimizers' states and any objects of one rank
    handles, process_sets                    what all of them have
"""
