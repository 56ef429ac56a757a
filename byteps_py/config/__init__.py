"""Settings of a process: what it reads from its environment, and what it chooses by itself.

The only modules that read the environment.
"""
