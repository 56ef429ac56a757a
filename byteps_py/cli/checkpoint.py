"""`bps checkpoint`: checkpoints of a training on disk, from what servers hold."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from byteps_py.cli.command import add_command
from byteps_py.cli.job_choice import add_job_choice, chosen_settings
from byteps_py.errors import ConfigurationError, UsageError
from byteps_py.system.terminal import ProgressBar

#: The automatic writer of checkpoints gives way to the server's sums.
_NICENESS = 19


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = add_command(
        subparsers,
        "checkpoint",
        help="write a checkpoint from what servers hold, while the training goes on",
        description="Write DIR/step-N in the format of torch.distributed.checkpoint, from the states that summation "
        "servers keep with DistributedOptimizer(…, shadow=True). Needs PyTorch on this machine.",
        example="bps checkpoint /data/checkpoints --every 600 --keep 3",
        exits={0: "a checkpoint is written, or is there already; with --every: the job has ended"},
    )
    parser.add_argument("folder", metavar="DIR", help="one folder for each training; made if it does not exist")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="write one after another until the job ends")
    parser.add_argument("--keep", type=int, metavar="N", help="remove all but the newest N; default: keep all")
    parser.add_argument("--with-parent", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--normal-priority", action="store_true", help=argparse.SUPPRESS)
    add_job_choice(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Write checkpoints. Returns 0; raises the errors of CheckpointProgram.run and CheckpointFolder, and
    ConfigurationError without PyTorch."""
    if arguments.every is not None and not 0 < arguments.every < 1e9:
        raise UsageError(f"--every={arguments.every:g}: give the seconds from one checkpoint to the next")
    if arguments.keep is not None and arguments.keep < 1:
        raise UsageError(f"--keep={arguments.keep}: at least the newest checkpoint is kept")
    from byteps_py.system import jobs
    from byteps_py.system.log import configure, logger
    from byteps_py.wire.launch_protocol import handle_signals

    settings = jobs.with_local_secret(chosen_settings(arguments))
    say: Callable[[str], None] = _print
    if arguments.with_parent:
        from byteps_py.launch.process_guard import die_with

        die_with(arguments.with_parent)()
        if not arguments.normal_priority:
            os.nice(_NICENESS)
        say = logger.info
    configure(settings.log_level, "checkpoint", settings.log_format, lambda: {"role": "checkpoint"})
    try:
        from byteps_py.checkpoint.program import CheckpointOptions, CheckpointProgram
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigurationError(
            "bps checkpoint needs PyTorch, and it is not installed here: pip install '.[torch]' (a build for "
            "the CPU is enough)"
        ) from None
    from byteps_py.checkpoint_files import CheckpointFolder

    options = CheckpointOptions(arguments.every, arguments.keep)
    with (
        handle_signals((signal.SIGTERM, signal.SIGINT), _end),
        CheckpointFolder(arguments.folder) as folder,
        ProgressBar("writing", is_wanted=not arguments.with_parent) as bar,
    ):

        def say_below(sentence: str) -> None:
            bar.clear()
            say(sentence)

        CheckpointProgram(settings, folder, options, say_below, progress=bar.update).run()
    return 0


def _print(sentence: str) -> None:
    print(sentence, flush=True)


def _end(signum: int, frame: object) -> NoReturn:
    sys.exit(128 + signum)  # incomplete files are removed
