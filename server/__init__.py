"""The summation service (SS): adds up what machines contribute, and sends each the sum.

    machines ──dataplane──► contribution_listeners.py ─► rounds.py ─► reducer.py ─► kernels
                                                            │
                                                            └─► shadow.py (states of hosted optimizers, kept in step)

``rounds`` and ``shadow`` decide and are pure. ``service`` is the process's life: it owns the loop.
"""
