"""Settings of a process: those that it reads from its environment, and those that it chooses by itself.

The only modules that read the environment.
"""
