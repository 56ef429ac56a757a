"""Gathers and exchanges of tensors whose sizes differ between ranks: what is behind allgather and alltoall.

    headers   what each rank has: dtype, dimensions, rows; ranks that disagree find it out here
    rooms     memory of a GATHER or an EXCHANGE that grows when it must
    two_rounds  a small round of fixed size that tells everybody the sizes, then the round of the data
    workers   threads that begin the second round of operations nobody is waiting for yet
    gather, alltoall  the two operations

Bytes, with n machines of l ranks each. The first round moves 1024 bytes of each rank to each other machine for a
gather, 128 of each rank to each rank of other machines for an exchange: out of each machine, and in, l(n-1)·1024, and
l²(n-1)·128. Most of a gather's are room for data: if that is small on all ranks (896 bytes for one tensor, 128 less for
each more), it is over with the first round. The second round moves what it must: a gather every rank's bytes to every
other machine once, an exchange each piece to its rank. (A group of more than 7 tensors has a round in between, of 128
bytes for each.)
"""
