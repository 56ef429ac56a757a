"""A rank's link to the communication service of its machine, and how it begins.

starting ─ RemoteSession ┬ Line   the channel: a thread that waits reads for all
                         └ slots  the shared memory of declared tensors
"""
