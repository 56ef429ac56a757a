"""A rank's link to the communication service of its machine, and how it begins.

starting ─ RemoteSession ┬ ChannelSession   the channel: one waiting thread reads for all
                         └ Slots            the shared memory of declared tensors
"""
