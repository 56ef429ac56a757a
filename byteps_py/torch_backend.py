"""Registers the backend "byteps" with torch.distributed.

torch calls ``register`` by itself (entry points ``torch.backends`` and ``torch.distributed.backends``), so that
``dist.init_process_group("byteps")`` needs no import of this package. This module is outside ``byteps_py.torch``, which
can only be imported once torch has been. Any thread.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

NAME = "byteps"


def register() -> None:
    """Register the backend. The backend's own code is imported when the first group is made.

    Does nothing if the backend is registered, or if torch was built without torch.distributed.
    """
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        # By this name, dist has a function.
        importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers["env"] = _meet


def _meet(url: str, **options: Any) -> Any:
    """``env://``. Whether it is that of bpslaunch --max-restarts is known now: torch may have been imported before."""
    if os.environ.get("BYTEPS_MAX_RESTARTS", "0") == "0":
        return importlib.import_module("torch.distributed.rendezvous")._env_rendezvous_handler(url, **options)
    from byteps_py.torch.collectives import torch_rendezvous

    return torch_rendezvous.meet(url, **options)


def _create(opts: Any, pg_options: Any = None) -> Any:
    from byteps_py.torch.process_group.byteps_process_group import create

    return create(opts, pg_options)
