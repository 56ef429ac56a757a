"""Collective operations on tensors, for the front ends gradients, horovod and process_group.

    process_group ─ GroupCollectives ─ Router ┬ AllReduce (all_reduce/) ┬ one-shot, shared memory, ┐
                                              │                         │ direct, hierarchical     ├─ PeerTransport
                                              ├ PeerCollectives, PointToPoint ─────────────────────┘
                                              │                         └ ServiceAllReduce ┐
                                              └ ServiceGathers, PointToPoint ──────────────┴ SlotView ─ Session
    horovod ┬ NegotiatedAllReduce (all_reduce/negotiated.py), PeerGathers ─ PeerTransport
            └ PieceView ─┐
    gradients ───────────┴ Context ─ SlotView ─ Mover (movers.py, cuda.py)

Context (context.py) holds the session of the process and everything that lives as long as it does. Router (router.py)
chooses the route of every operation, and gives the reason. An operation under way is a Work (work.py): GroupWork for
process groups (group_work.py), NamedWork for functions with names and handles. completion.py has the threads that
complete works for which no caller waits.

It must not know a front end. On the other side it knows byteps_py.session only.
"""
