"""Spare cores of other machines for running jobs, where no cluster manager hands machines out.

A lender offers what its owner does not use, a job says how many CPU machines it would like, and the pool brings both
together. Lenders and jobs ask the pool every second; one that falls silent is forgotten. So the pool keeps no state
that is lost with it: a pool that is started again knows everything after a few seconds, and meanwhile nothing changes.

    pool          which lender serves which job (pure)
    lender        when to start, drain and end servers on a lender's machine (pure)
    pool_service  the pool's process, and requests to it
    lend          the lender's process, and whether the owner of its machine needs it
    borrow        the process beside bpslaunch that speaks for a job
"""
