"""`bps completion`: what a shell needs to complete the command line of `bps`.

argcomplete (Apache-2.0) makes the text, and answers the shell from ``build_parser()``: what is completed is always what
`bps` accepts. An answer needs no module beside those of `bps --help`.
"""

from __future__ import annotations

import argparse
from typing import Any

from byteps_py.cli.command import add_command

SHELLS = ("bash", "zsh", "fish")


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = add_command(
        subparsers,
        "completion",
        help="print what a shell needs to complete the commands of bps",
        description="Print a script that makes a shell complete commands, options and the addresses of running jobs. "
        "bash reads it from ~/.local/share/bash-completion/completions/bps, or with: source <(bps completion bash). "
        "zsh reads it from a file _bps in a folder of $fpath, fish from ~/.config/fish/completions/bps.fish.",
        example="bps completion bash > ~/.local/share/bash-completion/completions/bps",
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["bps"], shell=arguments.shell))
    return 0
