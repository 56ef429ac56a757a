"""Large sums among ranks of one machine, in which each adds a share of the tensor and gives all others the sums."""
