"""Answers for Horovod's scripts about the build: which libraries carry the data. Any thread.

The communication service carries the data over shared memory and TCP, which Horovod uses Gloo for. So Gloo counts as
built, and as enabled from ``init()`` on. MPI, NCCL, DDL and oneCCL are not used. CUDA and ROCm tensors are accepted if
torch supports them.
"""

from __future__ import annotations

import torch

from byteps_py.torch.collectives import context as contexts


def mpi_built() -> bool:
    """False: MPI is not used."""
    return False


def mpi_enabled() -> bool:
    """False: MPI is not used."""
    return False


def mpi_threads_supported() -> bool:
    """True: mpi4py may be used from any thread, because this package makes no MPI calls.

    Raises NotInitializedError (a ValueError) before init().
    """
    contexts.current().session  # noqa: B018  raises NotInitializedError
    return True


def gloo_built() -> bool:
    """True: TCP is always supported."""
    return True


def gloo_enabled() -> bool:
    """True between init() and shutdown()."""
    return contexts.current().is_open


def nccl_built() -> int:
    """0, which is no version of NCCL: CUDA tensors go through host memory."""
    return 0


def ddl_built() -> bool:
    """False: DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """True if torch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """True if torch is built for ROCm."""
    return torch.version.hip is not None
