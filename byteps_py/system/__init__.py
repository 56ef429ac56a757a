"""The operating system: event loop, local channels, shared memory, the machine and its jobs."""
