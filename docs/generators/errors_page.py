"""docs/reference/errors.md: every class of byteps_py/errors.py, from its docstring."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import markdown

from byteps_py import errors

_PAGE = Path(__file__).parents[1] / "reference" / "failure-modes.md"
_HEAD = """# Errors

All errors that byteps_py raises on purpose, with what helps in general. A message says more: search for it in
[when something goes wrong](failure-modes.md). `byteps_py.errors` has all of these classes, and `byteps_py` those that a
training script may want to catch. `python docs/generators` makes this page from their docstrings.

"""


def text() -> str:
    tree = (errors.__doc__ or "").split("\n\n")[1]
    classes = [each for name, each in vars(errors).items() if inspect.isclass(each) and each.__name__ == name]
    return "\n".join([f"{_HEAD}```text\n{inspect.cleandoc(tree)}\n```\n", *map(_section, classes)])


def _section(cls: type[Exception]) -> str:
    *paragraphs, remedy = inspect.getdoc(cls).split("\n\n")  # type: ignore[union-attr]
    if not remedy.startswith("Remedy: "):
        raise ValueError(f"the docstring of {cls.__name__} does not end with a remedy")
    bases = [base.__name__ for base in cls.__bases__]
    parts = [f"## {cls.__name__}\n", *(f"{_linked(each)}\n" for each in paragraphs)]
    parts.append(f"**What to do:** {_linked(remedy.removeprefix('Remedy: '))}\n")
    parts.append(f"A subclass of {', '.join(_linked(base) for base in bases)}.\n")
    headings = re.findall(rf"^### (`{cls.__name__}: .+`)$", _PAGE.read_text(), re.MULTILINE)
    if headings:
        parts.append("Messages:\n\n" + "\n".join(f"- [{each}]({_address(each)})" for each in headings) + "\n")
    return "\n".join(parts)


def _address(heading: str) -> str:
    return f"failure-modes.md#{markdown.anchor(heading)}"


def _linked(text: str) -> str:
    """With links to the sections of the classes that it names."""
    text = markdown.single_backticks(" ".join(text.split()))
    names = [name for name, each in vars(errors).items() if inspect.isclass(each) and each.__name__ == name]
    return re.sub(
        rf"(?<![`\w])({'|'.join(names)})(?![`\w])", lambda match: f"[`{match[1]}`](#{match[1].lower()})", text
    )
