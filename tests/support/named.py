"""What docstrings, comments and pages name, and is not there: files, folders, modules and classes. In the product's
docstrings and comments also words like ``one_shot``: functions, variables, and modules without their ``.py``.

A class is a word like ``OneShotAllReduce``, with or without backticks, or a word with a capital in backticks. It is
known if code anywhere in the tree defines or uses it, so the classes of torch that our code uses are known, too.
Words that look like names and are none stand in the lists below.
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {"byteps_py": "byteps_py", "worker": "byteps_py.worker", "server": "byteps_py.server"}
PACKAGES |= {"proto": "byteps_py.proto"}
CODE = (*PACKAGES, "tests", "benchmarks", "examples", "deploy")
PAGES = re.compile(r"(docs|benchmarks/results)/.*\.md|README\.md|CONTRIBUTING\.md")

_FILE = re.compile(r"(?<![\w/.*<>$~-])((?:[\w.-]+/)*[\w-]+\.(?:py|proto|md))\b(?![(*])")
_FOLDER = re.compile(r"(?<![\w/.-])((?:byteps_py|tests|benchmarks|examples)/[\w./-]*\w)(?![\w*{<])")
_MODULE = re.compile(r"(?<![\w./-])(?:byteps_py|bps)((?:\.[A-Za-z_]\w*)+)")
_CAMEL = re.compile(r"(?<![\w./@-])(_?[A-Z][a-z0-9]+(?:[A-Z]+[a-z0-9]*)+)\b(?!://|/)")
_QUOTED = re.compile(r"(`{1,2})([^`\n]+)\1")
_CAPITAL = re.compile(r"(?<![\w./=-])(_?[A-Z][a-z]\w*)\b")
_SNAKE = re.compile(r"(?<![\w./-])(_*[a-z][a-z0-9]*(?:_[a-z0-9]+)+)\b(?![/-])")
_OF_EXAMPLE = re.compile(r">>> (\w+) = ")
_TOKEN = re.compile(
    r"""\"{3}(?:[^\\"]|\\.|"(?!""))*"{3}|'{3}(?:[^\\']|\\.|'(?!''))*'{3}|"(?:[^\\"\n]|\\.)*"|'(?:[^\\'\n]|\\.)*'|#[^\n]*"""
    r"""|[^\W\d]\w*""",
    re.DOTALL,
)
_STAR = re.compile(r"^from (byteps_py\.[\w.]+) import \*", re.MULTILINE)
_BEFORE_DOCSTRING = re.compile(r"(?:\A|:[ ]*(?:#.*)?\n)\s*r?\Z")

#: Files that users or other projects have.
FOREIGN_FILES = re.compile(r"train\.py|model\.py|MODEL\.py|\w+_byteps(?:_ddp)?\.py")
#: Products, algorithms, units and models: no classes.
PROPER_NAMES = """
    AlexNet BytePS ByteScheduler DeepSpeed DualPipeV F16C FlashAttention FlexFlow GitHub ImageNet InfiniBand KiB LoRA
    MiB MiCS MoE MxN NaN PaLM PipeDream PowerSGD PyPI PyTorch ResNet RoCE SwiGLU TensorBoard TensorFlow
    ZeRO ZeroMQ
"""
#: Classes of others that our code does not use.
FOREIGN_CLASSES = """
    BertModel CalledProcessError InitProcessGroupKwargs Interleaved1F1B LoadPlanner ParameterDict ProfilerActivity
    RoundBackward1
    VocabParallelEmbedding
    HorizontalPodAutoscaler JobSet JobSets NetworkPolicy PodDisruptionBudget RestartJob
    SummaryWriter TrainJob TrainJobs TrainJobStatus
"""
#: Alerts; words of Linux, ssh and torch; variables of formulas and examples.
FOREIGN_NAMES = """
    BytePSExposedCommunication BytePSMemberLost BytePSNoDurableShadow BytePSNoStep BytePSRankAwaited BytePSRecovery
    BytePSSlowMember
    BatchMode ProxyJump SendEnv ServerAliveInterval
    db_1 default_pg grad_fn grad_scale h_kv loss_function mesh_dp mesh_tp
    received_splits sharding_configs sun_path tcp_info to_empty Wqkv
"""
_ALLOWED = set(f"{PROPER_NAMES} {FOREIGN_CLASSES} {FOREIGN_NAMES}".split())


def read_source(source: str, strings: bool) -> tuple[Set[str], list[tuple[int, str]]]:
    """What code defines or uses, and its comments and docstrings, each with its line.

    ``strings``: a string that is a name counts as one, of an attribute or a key. Parsing would take ten times as long.
    """
    names, texts = set(), []
    for token in _TOKEN.finditer(source):
        text = token[0]
        if text[0] == "#":
            texts.append((token.start(), text))
        elif text[0] not in "\"'":
            names.add(text)
        elif strings and text[1:-1].isidentifier():
            names.add(text[1:-1])
        elif text.startswith('"""') and _BEFORE_DOCSTRING.search(source, max(0, token.start() - 200), token.start()):
            texts.append((token.start(), text))
    line, place, found = 1, 0, []
    for start, text in texts:
        line, place = line + source.count("\n", place, start), start
        found.append((line, text))
    return names, found


def module_of(file: str) -> str | None:
    """Of the package, by the file's path relative to the root; as it is installed."""
    top, *rest = file.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join([PACKAGES[top], *rest]) if top in PACKAGES and file.endswith(".py") else None


@dataclass(frozen=True, slots=True)
class Text:
    """A docstring, a comment or a page. ``line``: where it begins in ``file``."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True, repr=False)
class Tree:
    files: Set[str]  # relative to the root
    names: Set[str]
    modules: Mapping[str, Set[str]]  # of the product, each with the names in it
    texts: tuple[Text, ...]

    @classmethod
    def read(cls, root: Path) -> Tree:
        found = [path for folder in (*CODE, "docs") for path in sorted((root / folder).rglob("*")) if path.is_file()]
        paths = [path for path in found if path.parent.name != "__pycache__"]
        files = {path.relative_to(root).as_posix(): path for path in (*paths, *root.glob("*.*"))}
        names = {*dir(builtins), *sys.stdlib_module_names, *(path.stem for path in paths)}
        modules: dict[str, Set[str]] = {}
        stars: list[tuple[str, str]] = []
        texts = [Text(file, 1, path.read_text()) for file, path in files.items() if PAGES.fullmatch(file)]
        for file, path in files.items():
            if path.suffix == ".proto":
                names |= set(re.findall(r"\w+", path.read_text()))
            if path.suffix in (".py", ".pyi") and file.startswith(CODE):
                source = path.read_text()
                own, said = read_source(source, strings=module_of(file) is not None)
                names |= own
                if module := module_of(file):
                    modules[module] = own
                    stars += [(module, other) for other in _STAR.findall(source)]
                if path.suffix == ".py" and not path.stem.endswith(("_pb2", "_pb2_grpc")):
                    texts += [Text(file, line, text) for line, text in said]
        for module, other in stars:  # of a module that has none itself
            modules[module] |= modules[other]
        return cls(files.keys(), names, modules, tuple(texts))

    def unknown(self, text: Text) -> list[str]:
        """One sentence for each name in it that nothing has."""
        wrong = [(match.start(), match[1]) for match in _FILE.finditer(text.text) if not self._has_file(match[1])]
        wrong += [(match.start(), match[1]) for match in _FOLDER.finditer(text.text) if not self._has_folder(match[1])]
        wrong += [(match.start(), match[0]) for match in _MODULE.finditer(text.text) if not self._has_module(match[0])]
        wrong += [(match.start(), match[1]) for match in _CAMEL.finditer(text.text) if not self._has_name(match[1])]
        for quoted in _QUOTED.finditer(text.text):
            # Pages quote messages, too, whose words begin with capitals.
            words = _CAPITAL.findall(quoted[2]) if text.file.endswith(".py") or quoted[2].isidentifier() else ()
            wrong += [(quoted.start(), word) for word in words if not self._has_name(word)]
        if module_of(text.file):
            own = set(_OF_EXAMPLE.findall(text.text))
            found = [match for match in _SNAKE.finditer(text.text) if match[1] not in own]
            wrong += [(match.start(), match[1]) for match in found if not self._has_name(match[1])]
        places = {(text.line + text.text.count("\n", 0, start), name) for start, name in wrong}
        return [f"{text.file}:{line}: {name}" for line, name in sorted(places)]

    def _has_file(self, name: str) -> bool:
        if FOREIGN_FILES.fullmatch(name) or name == "byteps_py.proto":  # the package
            return True
        name = re.sub(r"^(?:\.\.?/)+", "", name)
        return any(file == name or file.endswith(f"/{name}") for file in self.files)

    def _has_folder(self, name: str) -> bool:
        return name in self.files or any(file.startswith((f"{name}/", f"{name}.")) for file in self.files)

    def _has_name(self, name: str) -> bool:
        """Also for the plural of a class."""
        likely = (name, f"_{name}", name.removeprefix("_"), name.removesuffix("s"))
        return any(each in self.names or each in _ALLOWED for each in likely)

    def _has_module(self, name: str) -> bool:
        """Also for a name in a module, or an alias of one; ``bps`` is the package."""
        name = re.sub("^bps", "byteps_py", name)
        if name in self.modules:
            return True
        module, _, last = name.rpartition(".")
        while module not in self.modules:
            module, _, last = module.rpartition(".")
        lazy = ("byteps_py.module_aliases", *(("byteps_py.torch",) if module == "byteps_py" else ()))
        return any(last in self.modules[each] for each in (module, *lazy))
