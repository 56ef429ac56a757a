"""``bps checkpoint``: writes checkpoints of a running training from what its servers hold."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from byteps_py import jobs
from byteps_py.cli.job_choice import add_job_arguments, chosen_settings
from byteps_py.errors import ConfigurationError, UsageError
from byteps_py.exit_status import handle_signals
from byteps_py.log import configure, logger

#: The automatic writer gives way to the server's sums.
_NICENESS = 19


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = subparsers.add_parser(
        "checkpoint",
        help="write a checkpoint from what servers hold, while the training goes on",
        description="Write DIR/step-N in the format of torch.distributed.checkpoint, from the states that summation "
        "servers keep with DistributedOptimizer(…, shadow=True). Needs PyTorch on this machine.",
    )
    parser.add_argument("folder", metavar="DIR", help="one folder for each training; made if it does not exist")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="write one after another until the job ends")
    parser.add_argument("--keep", type=int, metavar="N", help="remove all but the newest N; default: keep all")
    parser.add_argument("--with-parent", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--normal-priority", action="store_true", help=argparse.SUPPRESS)
    add_job_arguments(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Write. Returns 0; raises what CheckpointProgram.run and CheckpointFolder do, and ConfigurationError without
    PyTorch."""
    if arguments.every is not None and not 0 < arguments.every < 1e9:
        raise UsageError(f"--every={arguments.every:g}: give the seconds from one checkpoint to the next")
    if arguments.keep is not None and arguments.keep < 1:
        raise UsageError(f"--keep={arguments.keep}: at least the newest checkpoint is kept")
    settings = jobs.with_local_secret(chosen_settings(arguments))
    say: Callable[[str], None] = _print
    if arguments.with_parent:
        from byteps_py.launch.process_guard import die_with

        die_with(arguments.with_parent)()
        if not arguments.normal_priority:
            os.nice(_NICENESS)
        say = logger.info
    configure(settings.log_level, "checkpoint")
    try:
        from byteps_py.checkpoint.program import CheckpointOptions, CheckpointProgram
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigurationError(
            "bps checkpoint needs PyTorch, and it is not installed here: pip install '.[torch]' (a build for "
            "the CPU is enough)"
        ) from None
    from byteps_py.checkpoint_folder import CheckpointFolder

    with handle_signals((signal.SIGTERM, signal.SIGINT), _end), CheckpointFolder(arguments.folder) as folder:
        CheckpointProgram(settings, folder, CheckpointOptions(arguments.every, arguments.keep), say).run()
    return 0


def _print(sentence: str) -> None:
    print(sentence, flush=True)


def _end(signum: int, frame: object) -> NoReturn:
    sys.exit(128 + signum)  # what is half written is removed
