"""How a command of `bps` is declared: its help ends with an example and its exit codes. Any thread; needs only the
standard library."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

#: What 2 means for every command.
WRONG_INPUT = "the command line, a variable or a file is wrong"
_EXAMPLE = "example:\n"
_DEFAULT_EXITS = {0: "success", 1: "any other failure", 2: WRONG_INPUT}


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps a description, and leaves the example and the exit codes as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLE) else super()._fill_text(text, width, indent)


def add_command(
    subparsers: Any,
    name: str,
    *,
    help: str,
    example: str,
    description: str = "",
    exits: Mapping[int, str] | None = None,
) -> argparse.ArgumentParser:
    """A new parser among ``subparsers``.

    ``help``: one line for the list of commands. ``description``: by default ``help`` as a sentence. ``example``: a
    command line. ``exits``: the exit codes that are not those of every command, and their meanings.

    >>> parser = add_command(argparse.ArgumentParser().add_subparsers(), "go", help="go there", example="bps go")
    >>> print(parser.epilog)
    example:
      bps go
    <BLANKLINE>
    exit codes:
      0  success
      1  any other failure
      2  the command line, a variable or a file is wrong
    """
    codes = {**_DEFAULT_EXITS, **(exits or {})}
    listed = "\n".join(f"  {code}  {meaning}" for code, meaning in sorted(codes.items()))
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=help,
        description=description or f"{help[0].upper()}{help[1:]}.",
        epilog=f"{_EXAMPLE}  {example}\n\nexit codes:\n{listed}",
        formatter_class=_HelpFormatter,
    )
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")
