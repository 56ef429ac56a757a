"""Real processes, killed, frozen and drained at random while a model trains; the weights must be those of a calm run.

By hand: ``make chaos``, or ``python -m tests.chaos --faults 500``.
"""
