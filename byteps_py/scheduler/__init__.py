"""The scheduler, and the way to it over gRPC."""

import os

# gRPC logs each failed handshake on stderr, in its own words; what matters of it comes as an error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
