"""Finds the RDMA devices of this machine, and whether the library is installed, which is not imported. Any thread."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from byteps_py.config.settings import Settings
from byteps_py.errors import ConfigurationError

#: One is enough: they differ in the memory of GPUs, which is not read here.
_LIBRARIES = ("nixl_cu12", "nixl_cu13")
DEVICES = Path("/sys/class/infiniband")
REMEDY = "or unset DMLC_ENABLE_RDMA, and tensors travel over TCP"


def library() -> str:
    """The name of the installed library; empty: there is none."""
    return next((name for name in _LIBRARIES if importlib.util.find_spec(name) is not None), "")


def devices() -> list[str]:
    """The RDMA devices of this machine."""
    return sorted(path.name for path in DEVICES.glob("*"))


def why_not(settings: Settings, library: str, devices: Sequence[str]) -> tuple[str, str]:
    """Why a machine with this library and these devices can't do what ``settings`` say about RDMA, and the remedy;
    empty if it can, or needs not."""
    if not settings.rdma:
        return "", ""
    if not library:
        why = "DMLC_ENABLE_RDMA is set, and the library NIXL is not installed"
        return why, "pip install '.[rdma]', or nixl-cu12 alone with --no-deps"
    if not settings.rdma_transports and not devices:
        why = f"DMLC_ENABLE_RDMA is set, and this machine has no RDMA device ({DEVICES} is empty)"
        return why, "install the driver of its card, and give containers its devices (/dev/infiniband)"
    return "", ""


def check_rdma(settings: Settings) -> None:
    """Raises ConfigurationError if this machine can't do what ``settings`` say about RDMA."""
    why, remedy = why_not(settings, library(), devices())
    if why:
        raise ConfigurationError(f"{why}: {remedy}, {REMEDY}")
