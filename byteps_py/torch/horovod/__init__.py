"""The functions of ``horovod.torch`` and ``byteps.torch``.

    api, allreduce, scatter ─ reductions ─ plans
    broadcasts, functions ─ ops
    gathers ─ allgather, alltoall ─ two_rounds

A gather's or an alltoall's sizes may differ between ranks. It takes two rounds (two_rounds.py): a small round of fixed
size tells every rank the sizes (size_headers.py), then the data go.

Bytes, with n machines of l ranks each. The first round moves 1024 bytes of each rank to each other machine for a
gather, 128 of each rank to each rank of other machines for an exchange: out of each machine, and in, l(n-1)·1024, and
l²(n-1)·128. Most of a gather's are room for data: if that is small on all ranks (896 bytes for one tensor, 128 less for
each more), it is over with the first round. The second round moves what it must: a gather every rank's bytes to every
other machine once, an exchange each piece to its rank. (A group of more than 7 tensors has a round in between, of 128
bytes for each.)
"""
