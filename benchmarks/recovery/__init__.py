"""How long training takes to go on, or to end with an error, after a fault: ``python -m benchmarks.recovery``."""
