"""The communication service (CS): one process per GPU machine, its ranks' only way to the network.

    ranks ──channel──► ranks.py ──► agreement.py (what is a tensor) ──► scheduler
                                └─► pipeline.py  (what is due)      ──► kernels, links.py ──► servers

``agreement``, ``pipeline``, ``credit`` and ``tensor`` are pure: events in, actions out, no sockets, threads
or clocks. ``service`` carries: it owns the loop and turns actions into kernel calls and messages.
"""
