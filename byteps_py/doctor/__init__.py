"""The checks of `bps doctor`: of this machine and this installation, and of the ways to a job's members.

finding         what a look has found, and what to change
machine_checks  versions, cores, limits, ports, clock, GPUs and links of this machine
link_checks     latency and rate to each member of a job
"""
