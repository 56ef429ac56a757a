"""`bps env`: the environment variables that are read, their defaults and meanings."""

from __future__ import annotations

import argparse
import json
import re
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import add_command, add_json

if TYPE_CHECKING:
    from byteps_py.config.variables import Variable

_LINK = re.compile(r"\[([^]]+)\]\([^)]*\)")  # of Markdown


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = add_command(
        subparsers,
        "env",
        help="list the environment variables",
        description="List the environment variables that byteps_py reads. Of several names, the first one set counts.",
        example="bps env",
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown, as in docs/reference/variables.md")
    add_json(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    from byteps_py.config.settings import Settings
    from byteps_py.config.variables import VARIABLES

    defaults = Settings()
    rows = [(variable, _default(variable, getattr(defaults, variable.field))) for variable in VARIABLES]
    if arguments.json:
        keys = ("names", "default", "takes", "meaning", "detail")
        values = [(one.names, default, one.allowed(), one.meaning, one.detail) for one, default in rows]
        print(json.dumps([dict(zip(keys, each, strict=True)) for each in values], indent=2))
        return 0
    if arguments.markdown:
        print("| variable | default | takes | meaning |\n|---|---|---|---|")
        for variable, default in rows:
            names = ", ".join(f"`{name}`" for name in variable.names)
            print(f"| {names} | {default and f'`{default}`'} | {variable.allowed()} | {variable.meaning} |")
        print()
        for variable in VARIABLES:
            if variable.detail:
                print(f"- `{variable.names[0]}`: {variable.detail}")
        return 0
    for variable, default in rows:
        print(f"{', '.join(variable.names)}\n    {variable.meaning}")
        print(f"    takes {variable.allowed()}; default: {default or 'none'}")
        if variable.detail:
            print("    " + _LINK.sub(r"\1", variable.detail))
    return 0


def _default(variable: Variable, value: object) -> str:
    """The default as a user would write it in the environment; empty if there is none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, (int, float)) and variable.low is not None and value < variable.low:
        return ""  # a port of 0 means that there is none
    return f"{value:g}" if isinstance(value, float) else str(value)
