"""Gathers and exchanges of tensors whose sizes differ between ranks: what is behind allgather and alltoall.

    headers   what each rank has: dtype, dimensions, rows; ranks that disagree find it out here
    rooms     memory of a GATHER or an EXCHANGE that grows when it must
    two_rounds  a small round of fixed size that tells everybody the sizes, then the round of the data
    workers   threads that begin the second round of operations nobody is waiting for yet
    gather, alltoall  the two operations

Bytes, per machine of l ranks in a job of n: the first round moves 128 bytes per tensor, and for a gather 896 more,
from each rank to each rank of other machines: l(n-l)·(128k + 896) in and as much out (l(n-l)·128 for an exchange).
A gather whose tensors are small on all ranks (896 bytes together) is over with it. The second round moves what it
must: a gather every rank's bytes to every other machine, an exchange each piece to its rank.
"""
