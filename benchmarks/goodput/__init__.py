"""Training while processes and machines are killed: ``python -m benchmarks.goodput``."""
