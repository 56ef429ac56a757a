"""The site of the documentation: `make docs`. Its pages are the Markdown files of this repository, where they lie.

A page reads the same on a code host and in the site, so pages have no Sphinx directives, except those whose content is
made from docstrings (reference/api-*.md). The navigation is what docs/README.md lists.
"""

from __future__ import annotations

import inspect
import itertools
import re
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "byteps_py"
copyright = "the authors of byteps_py, Apache-2.0"
html_title = "byteps_py"
html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
napoleon_use_ivar = True
napoleon_attr_annotations = False
root_doc = "README"
source_suffix = {".md": "markdown"}
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md", "benchmarks/results/*.md"]
exclude_patterns = [".*", "build", "tests", "byteps_py", "worker", "server", "proto", "examples", "deploy"]

myst_heading_anchors = 4  # links to headings are those of a code host

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in ("Style", "LossFunction", "NewOptimizer", "DataParallelism")}
autodoc_type_aliases["tensor.Style"] = "Style"
autodoc_preserve_defaults = True  # as the source has them: ``global_process_set``, not its repr
add_module_names = False
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 100

HOW_TO_START = "How to start"
LISTED = re.compile(r"^(?:## (?P<kind>.+)|\| \[(?P<title>[^]]+)\]\((?P<page>[^)#]+)\.md\))", re.MULTILINE)
TOCTREE = "\n```{{toctree}}\n:hidden:\n{caption}\n\n{pages}\n```\n"


def navigation(root: Path) -> str:
    """The toctrees of the site: one for each group of pages that docs/README.md has, with the pages in its order. A
    how-to page that it lacks comes last in its group."""
    groups: dict[str, list[str]] = {"": ["All pages <docs/README>"]}
    for match in LISTED.finditer((root / "docs" / "README.md").read_text()):
        if match["kind"]:
            pages = groups.setdefault(match["kind"], [])
        else:
            page, title = match["page"], match["title"]
            if "." not in title.split()[0]:  # no name such as torch.distributed
                title = title[0].upper() + title[1:]
            pages.append(f"{title} <{page.removeprefix('../') if page.startswith('../') else f'docs/{page}'}>")
    listed = "".join(itertools.chain.from_iterable(groups.values()))
    groups[HOW_TO_START] += [
        f"docs/howto/{path.stem}"
        for path in sorted((root / "docs" / "howto").glob("*.md"))
        if f"<docs/howto/{path.stem}>" not in listed
    ]
    groups["Project"] = ["CONTRIBUTING", "CHANGELOG"]
    return "".join(
        TOCTREE.format(caption=f":caption: {group}" if group else "", pages="\n".join(pages))
        for group, pages in groups.items()
    )


def add_navigation(app: Any, docname: str, source: list[str]) -> None:
    if docname == root_doc:
        source[0] += navigation(Path(app.srcdir))
        app.env.note_reread()  # pages may have come
    elif docname == "benchmarks/results/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"


#: A sentence that comes after the descriptions of arguments.
SENTENCE = re.compile(r"(?:Any thread|All ranks|One thread|Raises|Call|Collective|The result)\b")


def read_as_written(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: an indented block is code or a picture, and a line that begins with an argument's name
    and a colon describes it. The rest is reStructuredText, or has sections such as ``Args:``."""
    lines[:] = itemized(lines, names_in(thing))
    for at in range(len(lines) - 1, 1, -1):
        above = lines[at - 2]
        is_block = lines[at].startswith("    ") and not lines[at - 1] and above and above[0] not in " -"
        if is_block and not above.endswith("::"):
            lines[at - 1 : at] = ["", "::", ""]


def itemized(lines: list[str], names: set[str]) -> list[str]:
    if not names:
        return lines
    either = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    begins = re.compile(rf"(\**(?:{either})(?:, \**(?:{either}))*):\s+(?=\S)")
    found: list[str] = []
    is_inside = False
    for line in lines:
        is_description = is_inside or begins.match(line)
        for part in re.split(rf"(?<=\.) (?=\**(?:{either}): |Raises )", line) if is_description else [line]:
            if match := begins.match(part):
                found += [] if is_inside else [""]
                found.append(f"- ``{match[1]}``: {part[match.end() :]}")
                is_inside = True
            elif is_inside and part and not part.startswith(" ") and not SENTENCE.match(part):
                found.append(f"  {part}")
            else:
                found += [""] if is_inside else []
                is_inside = False
                found.append(part)
    return found


def name_aliases(app: Any, what: str, name: str, thing: Any, options: Any, signature: str, returns: str) -> Any:
    """Of types, also inside of others."""
    return re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", signature or "") or None, returns


def names_in(thing: Any) -> set[str]:
    """Of a function's arguments, and of a class's fields."""
    try:
        arguments = set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        arguments = set()
    return arguments | set(getattr(thing, "__annotations__", ()))


def enter_at_the_root(app: Any, error: Exception | None) -> None:
    """The site's first page is the README: also for those who ask for the folder."""
    if error is None and app.builder.format == "html":
        shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Any) -> None:
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", read_as_written, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", name_aliases)
    app.connect("build-finished", enter_at_the_root)
