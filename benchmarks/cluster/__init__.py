"""Reductions across machines with shaped links, on one machine: hosts are network namespaces."""
