"""`bps COMMAND …`, also `python -m byteps_py.cli`.

Each module of ``COMMANDS`` has ``add_parser(subparsers)``. It adds the parsers of one or more commands, and sets
``handler=``: a function of the parsed arguments that returns the exit code. A module imports its dependencies inside
its handler: `bps --help` loads neither torch nor gRPC.

Exit codes: 0 success; 2 the command line, a variable or a file is wrong; 1 any other failure, or a job that has failed;
130 after Ctrl-C. What 0 and 1 mean for a command is in its help.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from byteps_py import __version__
from byteps_py.errors import BytePSError, ConfigurationError, UsageError

#: Modules of this package, in the order of `bps --help`.
COMMANDS = (
    "doctor", "job", "top", "logs", "dump", "checkpoint", "bench", "lending", "placement", "topology", "plan",
    "schedule", "simulate", "numerics", "replay", "trace", "env", "completion",
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """The parser of `bps` with all its commands."""
    parser = argparse.ArgumentParser(
        prog="bps",
        description="Inspect and steer a byteps_py cluster.",
        epilog="bps COMMAND --help has an example and the exit codes of each command; bpslaunch starts a job.",
    )
    parser.add_argument("--version", action="version", version=f"byteps_py {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"byteps_py.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``argv``: without the program's name; default: the process's."""
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks how the command line may go on
        import argcomplete

        argcomplete.autocomplete(parser)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.handler(arguments)
        sys.stdout.flush()
    except BytePSError as error:
        print(f"bps: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigurationError, UsageError)) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has ended (`| head`)
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())  # for the output that Python flushes at exit
        os.close(devnull)
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
