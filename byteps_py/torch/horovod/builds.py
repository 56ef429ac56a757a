"""What Horovod's scripts ask about the build: which libraries carry the data. Any thread.

Here the service itself does, over shared memory and TCP: what Horovod has Gloo for. So Gloo counts as built, and as
enabled from ``init()`` on; MPI, NCCL, DDL and oneCCL are neither used nor needed. CUDA and ROCm tensors can be given
if torch can make them.
"""

from __future__ import annotations

import torch

from byteps_py.torch.engine import context as contexts


def mpi_built() -> bool:
    """False: MPI is not used."""
    return False


def mpi_enabled() -> bool:
    """False: MPI is not used."""
    return False


def mpi_threads_supported() -> bool:
    """True: mpi4py may be used beside this package, from any thread, since the package itself makes no MPI calls.

    Raises NotInitializedError (a ValueError) before init().
    """
    contexts.current().session  # noqa: B018  raises NotInitializedError
    return True


def gloo_built() -> bool:
    """True: there is always a way over TCP."""
    return True


def gloo_enabled() -> bool:
    """True between init() and shutdown()."""
    return contexts.current().is_open


def nccl_built() -> int:
    """0, as no version of NCCL: CUDA tensors go through the host's memory."""
    return 0


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """True if torch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """True if torch is built for ROCm."""
    return torch.version.hip is not None
