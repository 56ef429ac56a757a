"""The data plane: authenticated TCP connections that carry tensors between communication and summation services."""
