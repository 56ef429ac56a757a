"""docs/reference/wire-protocol.md: every message between processes, from the sources that define them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import markdown

_ROOT = Path(__file__).parents[2]
_HEAD = """# Wire protocol

Every message between the processes of a job. [Architecture](../explanation/architecture.md) says which processes there
are, [agreement](../internals/protocol.md) what they agree on, and [security](../explanation/security.md) how links are
protected. `python docs/generators` makes this page from the sources that each section names.

- [Ranks](#ranks): between a rank and the communication service (CS) of its machine, over a Unix socket. Tensors lie in
  shared memory, whose descriptors the socket passes.
- [Data plane](#data-plane): between a CS and a summation service (SS), or two CSs, over TCP; on one machine over a Unix
  socket and shared memory. Both ends prove that they know the job's secret; then each message is sealed.
- [Control plane](#control-plane): each CS and SS has one gRPC stream to the scheduler, over mutual TLS.
- [Journal](#journal): what the scheduler writes to a file, from which another one goes on.

A process refuses a peer with another version of a link's protocol, by an error that names both versions.

"""


def text() -> str:
    return "\n".join(
        [
            f"{_HEAD}## Ranks\n\n`byteps_py/wire/rank_link.py`. A message is a code, numbers, then texts and lists.\n",
            _records(_ROOT / "byteps_py" / "wire" / "rank_link.py"),
            "## Data plane\n\n`byteps_py/wire/data_link.py`. A message is a header and a payload. The header has:\n",
            _header(),
            "Its kinds:\n",
            _kinds(),
            "## Control plane\n\n`proto/control.proto`.\n",
            *_proto("control.proto"),
            "## Journal\n\n`proto/journal.proto`.\n",
            *_proto("journal.proto"),
        ]
    )


# ---- Python --------------------------------------------------------------------------------------------------------


def _records(path: Path) -> str:
    rows = []
    for node in ast.parse(path.read_text()).body:
        codes = [
            each.args[0].value
            for each in getattr(node, "decorator_list", ())
            if isinstance(each, ast.Call) and ast.unparse(each.func) == "_link.message"
        ]
        if isinstance(node, ast.ClassDef) and codes:
            fields = [f"`{ast.unparse(each)}`" for each in node.body if isinstance(each, ast.AnnAssign)]
            said = markdown.single_backticks((ast.get_docstring(node) or "").replace("Attributes:\n", ""))
            rows.append((str(codes[0]), f"`{node.name}`", said, ", ".join(fields)))
    rows.sort(key=lambda row: int(row[0]))
    return markdown.table(("code", "message", "meaning", "fields"), rows)


def _header() -> str:
    tree = ast.parse((_ROOT / "byteps_py" / "wire" / "data_link.py").read_text())
    [header] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Header"]
    said = (ast.get_docstring(header) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    rows = [(f"`{name}`", meaning) for name, meaning in re.findall(r"^    (\w+): ((?:.|\n {5,})+)", said, re.MULTILINE)]
    return markdown.table(("field", "meaning"), rows)


def _kinds() -> str:
    source = (_ROOT / "byteps_py" / "wire" / "data_link.py").read_text()
    body = source.partition("class Kind(enum.IntEnum):")[2].partition("\n\n\n")[0]
    rows = [
        (value, f"`{name}`", _prose(comment or _joined(above)))
        for above, name, value, comment in re.findall(
            r"((?:^    # .*\n)*)^    ([A-Z_]+) = (\d+)(?:  # (.+))?$", body, re.MULTILINE
        )
    ]
    rows.sort(key=lambda row: int(row[0]))
    return markdown.table(("code", "kind", "meaning"), rows)


def _joined(comment: str) -> str:
    return " ".join(line.strip().removeprefix("#").strip() for line in comment.splitlines())


# ---- protobuf ------------------------------------------------------------------------------------------------------

_BLOCK = re.compile(r"((?:^// [^\n]*\n)*)^(service|enum|message) (\w+) \{(.*?)^\}$", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^ *((?:repeated )?[\w.]+) (\w+) = (\d+);(?: *// (.*))?$")
_VALUE = re.compile(r"^ *(\w+) = (\d+);(?: *// (.*))?$")
_CALL = re.compile(r"^ *rpc (\w+)\((.*?)\) returns \((.*?)\);")


def _proto(name: str) -> Iterator[str]:
    source = (_ROOT / "proto" / name).read_text()
    source = re.sub(r"^((?:// .*\n)*)message (\w+) \{\}$", r"\1message \2 {\n}", source, flags=re.MULTILINE)
    for comment, kind, title, body in _BLOCK.findall(source):
        yield f"### {title}\n"
        if comment:
            yield f"{_prose(_joined(comment.replace('//', '#')))}\n"
        rows = list(_rows(kind, body))
        if rows:
            titles = {"service": ("call", "takes", "returns", "meaning"), "enum": ("number", "value", "meaning")}
            yield markdown.table(titles.get(kind, ("number", "field", "type", "meaning")), rows)
        elif not comment:
            yield "Empty.\n"


def _rows(kind: str, body: str) -> Iterator[tuple[str, ...]]:
    above: list[str] = []
    for line in body.splitlines():
        if line.strip().startswith("//"):
            above.append(line.strip().removeprefix("//").strip())
            continue
        said = _prose(" ".join(above))
        if kind == "service" and (call := _CALL.match(line)):
            yield f"`{call[1]}`", f"`{call[2]}`", f"`{call[3]}`", said
        elif kind == "enum" and (value := _VALUE.match(line)):
            yield value[2], f"`{value[1]}`", _prose(value[3] or "") or said
        elif field := _FIELD.match(line):
            yield field[3], f"`{field[2]}`", f"`{field[1]}`", _prose(field[4] or "") or said
        above = []


def _prose(text: str) -> str:
    return markdown.single_backticks(text)
