"""Large sums in shared memory: each rank of a machine adds a share of the tensor and gives all others the sums."""
