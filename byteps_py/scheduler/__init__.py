"""The scheduler, and the way to it over gRPC."""

import os

# gRPC logs each failed handshake on stderr. Those that matter are raised as errors with more to say.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
