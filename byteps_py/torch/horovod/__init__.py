"""The functions of ``horovod.torch`` and ``byteps.torch``, one file for each operation.

    api, allreduce, reducescatter ─ reductions ─ reduction_plans
    broadcast;  functions, objects ─ broadcast_stream
    allgather, alltoall ─ two_rounds, size_headers

Tensors of an allgather or an alltoall may differ in size between ranks, so the operation takes two rounds
(two_rounds.py): a small round of fixed size tells every rank the sizes (size_headers.py), then the data travel.

Bytes, with n machines of l ranks each. First round: an allgather moves 1024 bytes from each rank to each other machine,
an alltoall 128 bytes from each rank to each rank on another machine. So l(n-1)·1024 or l²(n-1)·128 bytes leave each
machine, and as many arrive. Most of the 1024 bytes is room for data: an allgather ends with the first round if every
rank's data fit (896 bytes for one tensor, 128 less for each further tensor). Second round: an allgather moves each
rank's data once to each other machine, an alltoall moves each piece to its rank. (A group of more than 7 tensors has a
round in between, of 128 bytes for each tensor.)
"""
