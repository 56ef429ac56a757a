"""The communication service (CS): one process per GPU machine, its ranks' only way to the network.

    ranks ──channel──► ranks/rank_server.py ─► ranks/request_handler.py
                            │
                            ├─► core/agreement.py (what a tensor is) ──► scheduler
                            └─► core/round_pipeline.py (what is due)      ──► io/executor.py, io/network.py ──► servers

``core`` decides and is pure, ``io`` carries, ``ranks`` deals with the local ranks. ``group`` is all that belongs to one
group of ranks, ``service`` the process's life: it owns the loop.
"""
