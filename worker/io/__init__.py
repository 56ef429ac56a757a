"""What a communication service carries: sockets, shared memory, kernels. It does what ``core`` has decided, and decides
nothing. Owned by the loop's thread.
"""
