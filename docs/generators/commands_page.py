"""docs/reference/commands.md: every option of `bps` and `bpslaunch`, from their parsers."""

from __future__ import annotations

import argparse
import re

import markdown

from byteps_py.cli.__main__ import build_parser as bps
from byteps_py.launch.command_line import build_parser as bpslaunch

_HEAD = """# Commands

Every option of `bpslaunch`, which starts jobs, and of `bps`, which looks at them. `--help` prints the same.
`python docs/generators` makes this page from the parsers. [Start a job](../howto/launching.md) and
[look after a job](../howto/operating.md) have examples.

"""


def text() -> str:
    return _HEAD + "\n".join([_command(bpslaunch(), 2, "bpslaunch"), *_with_subcommands(bps(), 2)])


def _with_subcommands(parser: argparse.ArgumentParser, level: int) -> list[str]:
    found = [_command(parser, level, parser.prog)]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                found += _with_subcommands(each, min(level + 1, 4))
    return found


def _command(parser: argparse.ArgumentParser, level: int, name: str) -> str:
    parts = [f"{'#' * level} {name}\n", *_paragraphs(parser.description or "")]
    subcommands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    shown = [
        action
        for action in parser._actions
        if action.help is not argparse.SUPPRESS and action not in subcommands and action.dest != "help"
    ]
    if shown:
        parts.append(markdown.table(("option", "meaning"), [(_names(action), _help(action)) for action in shown]))
    if subcommands:
        rows = [
            (f"[`{parser.prog} {each.dest}`](#{markdown.anchor(f'{parser.prog} {each.dest}')})", each.help or "")
            for action in subcommands
            for each in action._choices_actions
        ]
        parts.append(markdown.table(("command", "what it does"), rows))
    return "\n".join([*parts, *_paragraphs(parser.epilog or "")])


def _paragraphs(text: str) -> list[str]:
    """Lines that are indented, or laid out in columns, stay as they are."""
    found = []
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        if re.search(r"^ |\S {2,}\S", part, re.MULTILINE):
            found.append(f"```text\n{part}\n```\n")
        elif part:
            found.append(f"{_escaped(part)}\n")
    return found


def _names(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    names = ", ".join(f"`{name}{value}`" for name in action.option_strings)
    return f"{names} (required)" if action.required else names


def _help(action: argparse.Action) -> str:
    text = _escaped((action.help or "").replace("%%", "%"))
    if action.choices:
        text += f" (one of {', '.join(f'`{choice}`' for choice in action.choices)})"
    return text


def _escaped(text: str) -> str:
    return re.sub(r"([*<>\[\]])", r"\\\1", text)
