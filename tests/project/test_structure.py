"""Which part of the package imports which: arrows point to the shared ground, and not back. What texts say is there."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.named import PACKAGES, Text, Tree

ROOT = Path(__file__).parents[2]
FOLDERS = {"byteps_py": ROOT / "byteps_py", "byteps_py.server": ROOT / "server", "byteps_py.worker": ROOT / "worker"}
GROUND = "the shared ground"  # the modules of byteps_py itself
#: What each part may import beside itself and the ground. ``scheduler.client``: a member's end of its control link.
ALLOWED = {
    GROUND: set[str](),
    "kernels": set(),
    "codecs": {"kernels"},
    "placement": set(),
    "topology": set(),
    "dataplane": set(),
    "runtime": {"codecs", "dataplane", "kernels"},
    "launch": {"scheduler.query"},  # a spare machine asks for whom the job waits
    "session": {"dataplane", "kernels", "topology"},
    "scheduler": {"placement", "dataplane"},
    "cli": {
        "placement",
        "scheduler",
        "parallel",
        "tools",
        "checkpoint",
        "doctor",
        "lending",
        "topology",
        "launch.process_guard",
    },
    "lending": {"scheduler", "launch.process_guard"},
    "doctor": {"dataplane", "scheduler", "runtime", "topology", "worker.io", "launch.installation"},
    "server": {"codecs", "dataplane", "kernels", "runtime", "topology", "scheduler.client"},
    "worker": {"codecs", "dataplane", "kernels", "placement", "runtime", "topology", "scheduler.client"},
    "shadow": {"dataplane", "kernels", "scheduler"},
    "torch": {"kernels", "session", "shadow", "topology"},
    "parallel": {"torch"},
    "tools": {"parallel", "placement.hosted_shares"},
    "checkpoint": {"kernels", "shadow", "torch"},
    "ray": {"torch", "scheduler.query", "launch.process_guard", "launch.process_plan"},
}
#: ``import byteps_py`` has the names of byteps_py.torch, once they are asked for; torch asks for the backend by name.
#: ``bps.parallel`` has numerics, which is a tool.
FRONT_DOORS = {
    ("byteps_py", "torch"),
    ("byteps_py.torch_backend", "torch"),
    ("byteps_py.torchft", "torch"),
    ("byteps_py.parallel", "tools"),
}


#: The rooms of byteps_py.torch: the front ends stand on the operations, and these on the collectives. Gradients are
#: exchanged without Horovod's functions. compression and timeline belong to all.
ROOMS = {
    "collectives": set[str](),
    "operations": {"collectives", "compression"},
    "horovod": {"collectives", "operations", "compression", "timeline"},
    "gradients": {"collectives", "operations", "compression", "optim"},
    "optim": set(),
    "process_group": {"collectives", "compression"},
    "elastic": {"collectives", "operations", "horovod"},
    "run": {"collectives", "operations", "gradients", "elastic", "local"},
    "local": {"collectives", "operations", "gradients", "compression"},
    "compression": set[str](),
    "timeline": {"collectives"},
    "training_metrics": {"collectives"},
}


#: The rooms of the shared ground.
GROUND_ROOMS = {
    "config": set[str](),
    "system": {"config"},
    "security": {"config", "system"},
    "wire": {"config", "system"},
    "prometheus": {"config", "system"},
}


@dataclass(frozen=True, slots=True)
class Sources:
    """What all sources define and import. They are read once: that takes seconds.

    Attributes:
        imports: (module, what it imports, path and line), inside functions and for typing, too.
        classes: paths by name.
        functions: (name with its class, number of parameters, path and line).
    """

    imports: list[tuple[str, str, str]]
    classes: dict[str, list[str]]
    functions: list[tuple[str, int, str]]


@functools.cache
def sources() -> Sources:
    found = Sources([], {}, [])
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            module = ".".join(parts).removesuffix(".__init__")
            inside: dict[ast.AST, str] = {}
            for node in ast.walk(ast.parse(path.read_text())):
                place = f"{path}:{getattr(node, 'lineno', 0)}"
                if isinstance(node, ast.Import):
                    found.imports.extend((module, alias.name, place) for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module is not None:
                    found.imports.extend((module, f"{node.module}.{alias.name}", place) for alias in node.names)
                elif isinstance(node, ast.ClassDef):
                    found.classes.setdefault(node.name, []).append(f"{package}/{path.relative_to(folder)}")
                    inside.update((function, node.name) for function in node.body)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    given = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                    count = len([name for name in given if name not in ("self", "cls")])
                    name = f"{inside[node]}.{node.name}" if node in inside else node.name
                    found.functions.append((name, count, place))
    return found


@functools.cache
def imports() -> set[tuple[str, str]]:
    """(module, module of this package that it imports)"""
    return {(module, other) for module, other, _ in sources().imports if other.split(".")[0] == "byteps_py"}


def part_of(module: str) -> str:
    name = module.split(".")[1] if "." in module else ""
    return name if name in ALLOWED else GROUND


def test_rooms_of_the_front_ends_stand_on_the_collectives() -> None:
    wrong = []
    for module, other in sorted(imports()):
        if module.startswith("byteps_py.torch.") and other.startswith("byteps_py.torch."):
            room, wanted = module.split(".")[2], other.split(".")[2]
            if room != wanted and wanted not in ROOMS[room]:
                wrong.append(f"{module} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_rooms_of_the_ground_import_one_way() -> None:
    wrong = []
    for module, other in sorted(imports()):
        room, wanted = (f"{name}..".split(".")[1] for name in (module, other))
        if room in GROUND_ROOMS and wanted in GROUND_ROOMS and wanted not in {room, *GROUND_ROOMS[room]}:
            wrong.append(f"{module} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_arrows_point_one_way() -> None:
    wrong = []
    for module, other in sorted(imports()):
        part, wanted = part_of(module), part_of(other)
        inner = ".".join(other.split(".")[1:3])
        if part == wanted or wanted == GROUND or {wanted, inner} & ALLOWED[part] or (module, wanted) in FRONT_DOORS:
            continue
        wrong.append(f"{module} ({part}) imports {other} ({wanted})")
    assert not wrong, "\n".join(wrong)


#: Streams and events of CUDA belong to movers, which tests replace; those of offloaded states to their side stream.
WITH_STREAMS = {"torch/collectives/cuda.py", "parallel/sharding/offload.py"}


def test_streams_of_cuda_are_asked_for_in_one_place() -> None:
    calls = re.compile(r"torch\.cuda\.(stream|Stream|Event|current_stream|synchronize)\b")
    folder = FOLDERS["byteps_py"]
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.py") if calls.search(path.read_text())}
    assert found == WITH_STREAMS


#: They may need torch. The backend's registration imports it when torch calls it.
WITH_TORCH = {"torch", "parallel", "tools", "checkpoint", "ray"}


def test_only_launchers_fork() -> None:
    """A process that uses CUDA must not: its children could not. A warm process has imported torch, and no more."""
    forks = re.compile(r"\bos\.fork\w*\(|\b(get_context|set_start_method|ProcessPoolExecutor)\(")
    forking = {
        f"{name}/{path.relative_to(folder)}": path.read_text()
        for name, folder in FOLDERS.items()
        for path in folder.rglob("*.py")
        if forks.search(path.read_text())
    }
    assert set(forking) == {"byteps_py/launch/process_guard.py", "byteps_py/launch/warm_process.py"}
    assert not any(re.search(r"\bcuda\b", text) for text in forking.values())


def test_services_and_commands_do_without_torch() -> None:
    """They run on machines that have none."""
    importing = [(module, place) for module, other, place in sources().imports if other.split(".")[0] == "torch"]
    wrong = [
        place for module, place in importing if part_of(module) not in WITH_TORCH and "torch_backend" not in module
    ]
    assert importing
    assert not wrong, "\n".join(wrong)


def test_every_part_is_there() -> None:
    assert {part_of(module) for module, _ in imports()} == set(ALLOWED)


#: A module that decides is given the time, and what has come: it neither waits nor asks.
IO_MODULES = {"asyncio", "os", "select", "selectors", "signal", "socket", "subprocess", "threading", "time", "zmq"}
IO_OF_BYTEPS = ("byteps_py.system.channel", "byteps_py.dataplane", "byteps_py.system.loop", "byteps_py.runtime")


def test_the_core_of_the_communication_service_does_no_io() -> None:
    """It imports no sockets, threads or clocks, and of the service only itself."""
    wrong = []
    for path in sorted((ROOT / "worker" / "core").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                is_io = name.split(".")[0] in IO_MODULES or name.startswith(IO_OF_BYTEPS)
                is_shell = name.startswith("byteps_py.worker") and not name.startswith("byteps_py.worker.core")
                if is_io or is_shell:
                    wrong.append(f"{path.name}:{node.lineno} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_rooms_of_the_communication_service_import_one_way() -> None:
    """ranks → io → core; what stands above them may import all."""
    below = {"core": (), "io": ("core",), "ranks": ("core", "io")}
    wrong = []
    for module, other in sorted(imports()):
        room, wanted = (name.split(".")[2] if name.startswith("byteps_py.worker.") else "" for name in (module, other))
        if room in below and wanted and wanted != room and wanted not in below[room]:
            wrong.append(f"{module} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Inside functions and for typing, too: a file can be read after those that it imports."""
    edges: dict[str, set[str]] = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            edges[".".join(parts).removesuffix(".__init__")] = set()
    for module, other in imports():
        target = other if other in edges else other.rpartition(".")[0]
        if target in edges and target != module and (module, part_of(target)) not in FRONT_DOORS:
            edges[module].add(target)
    while leaves := {module for module, targets in edges.items() if not targets & edges.keys()}:
        edges = {module: targets for module, targets in edges.items() if module not in leaves}
    left = {module: sorted(targets & edges.keys()) for module, targets in edges.items()}
    assert not left, "\n".join(f"{module} imports {', '.join(targets)}" for module, targets in left.items())


def test_no_class_name_is_used_twice() -> None:
    """A name in a traceback, or in a search, means one thing."""
    assert {name: places for name, places in sources().classes.items() if len(places) > 1} == {}


#: What users know by name, and what numba calls.
MAY_HAVE_MORE = {
    "DistributedOptimizer",
    "allreduce",
    "grouped_allreduce",
    "SyncBatchNorm.__init__",
    "_reduction",
    "_optimizer_step",
}
MOST_PARAMETERS = 7


def test_functions_have_few_parameters() -> None:
    """More go together in an options object."""
    more = [(name, count, place) for name, count, place in sources().functions if count > MOST_PARAMETERS]
    wrong = [f"{place}: {name} has {count}" for name, count, place in more if name not in MAY_HAVE_MORE]
    assert {name for name, _, _ in more} == MAY_HAVE_MORE
    assert not wrong, "\n".join(wrong)


#: Where state machines live.
CORES = (
    "worker/core/*.py",
    "server/*.py",
    "byteps_py/scheduler/**/*.py",
    "byteps_py/session/peers/resumable_stream.py",
)
MOST_METHODS = 8


def test_a_core_with_many_methods_says_why() -> None:
    """A state machine has one door, ``handle``, and a few questions; a part of one, or a table, says that it is one."""
    wrong = []
    for path in sorted(path for pattern in CORES for path in ROOT.glob(pattern)):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                public = [
                    each.name
                    for each in node.body
                    if isinstance(each, ast.FunctionDef) and each.name[0] != "_" and not each.decorator_list
                ]
                if len(public) > MOST_METHODS and "method" not in (ast.get_docstring(node) or ""):
                    wrong.append(f"{path.relative_to(ROOT)}: {node.name} has {', '.join(public)}")
    assert not wrong, "\n".join(wrong)


#: What LLVM compiles for a processor that this one is not, and where nothing can be kept.
MAY_REPLACE = {"test_kernels_process.py", "test_deploy.py"}


def product_names(tree: ast.Module) -> set[str]:
    """Names that stand for modules and classes of this package."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "byteps_py":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname or alias.name for alias in node.names if alias.name.split(".")[0] == "byteps_py"}
    return names


def test_tests_replace_no_name_of_the_product() -> None:
    """A test gives constructors another runtime, or a subclass: see CONTRIBUTING.md."""
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text()
        if path.name in MAY_REPLACE or not re.search(r"setattr|patch", text):
            continue
        tree = ast.parse(text)
        names = product_names(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            what, target = ast.unparse(node.func), ast.unparse(node.args[0])
            is_replacement = what.endswith(("setattr", "patch", "patch.object", "patch.multiple"))
            is_of_product = target in names or target.strip("'\"").startswith("byteps_py")
            if is_replacement and is_of_product:
                wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


# ---- what docstrings, comments and pages say is there ------------------------------------------------------------


@pytest.fixture(name="tree", scope="module")
def _tree() -> Tree:
    return Tree.read(ROOT)


def test_what_texts_name_is_there(tree: Tree) -> None:
    """Files, folders, modules and classes. A word that only looks like one belongs to the lists of support/named.py."""
    wrong = [name for text in tree.texts for name in tree.unknown(text)]
    assert not wrong, "named, but not there:\n" + "\n".join(wrong)


#: What is right to say in a docstring of the product, and what is not.
RIGHT = """See collectives/router.py, docs/reference/glossary.md, byteps_py/torch/collectives
and byteps_py.errors.UsageError.

``Router`` and RouteChoice choose; GradScalers are torch's, ZeroMQ is no class. optimizer_mixin is a module.
``byteps_py.torch.ops`` is an alias, ``byteps_py.worker.core.round_pipeline`` and `bps.parallel.Pipeline` are there.

>>> of_this_example = 1
"""
WRONG = {
    "See no_such_module.py.": "no_such_module.py",
    "See server/router.py.": "server/router.py",
    "It is in tests/support/nothing.": "tests/support/nothing",
    "See docs/nothing.md.": "docs/nothing.md",
    "It calls byteps_py.torch.nothing.": "byteps_py.torch.nothing",
    "It calls byteps_py.worker.links.": "byteps_py.worker.links",
    "Call ``bps.no_such_call()``.": "bps.no_such_call",
    "A NoSuchThing does it.": "NoSuchThing",
    "A ``Nosuch`` does it.": "Nosuch",
    "See `_Nosuch.do`.": "_Nosuch",
    "no_such_word ─ router": "no_such_word",
}


def test_names_that_are_there_are_right(tree: Tree) -> None:
    for file in ("server/service.py", "docs/page.md"):
        assert tree.unknown(Text(file, 1, RIGHT)) == []


@pytest.mark.parametrize("sentence", WRONG, ids=WRONG.get)
def test_names_that_are_not_there_are_found(tree: Tree, sentence: str) -> None:
    found = tree.unknown(Text("server/service.py", 10, f"What it does.\n\n{sentence}\n"))
    assert f"server/service.py:12: {WRONG[sentence]}" in found


def test_comments_and_docstrings_are_read(tmp_path: Path) -> None:
    """Of modules, classes and functions, also behind signatures of several lines; no other strings."""
    source = [
        '"""Says FirstThing."""',
        "class Real:  # SecondThing",
        '    """Says ThirdThing."""',
        "    def f(",
        "        self, x: str = '# NoThing'",
        "    ) -> None:",
        '        r"""Says',
        '        FourthThing."""',
        '        x = """NoThing"""',
        "        #: FifthThing",
    ]
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "thing.py").write_text("\n".join(source))
    read = Tree.read(tmp_path)
    places = [(1, "First"), (2, "Second"), (3, "Third"), (8, "Fourth"), (10, "Fifth")]
    expected = [f"server/thing.py:{line}: {which}Thing" for line, which in places]
    assert sorted((name for text in read.texts for name in read.unknown(text)), key=expected.index) == expected


# ---- the tree of CONTRIBUTING.md ---------------------------------------------------------------------------------


def packages_in(folder: Path) -> set[str]:
    return {
        path.parent.relative_to(folder).as_posix() for top in PACKAGES for path in (folder / top).rglob("__init__.py")
    }


def listed_in(page: str) -> list[str]:
    """The folders in the first column of the table, ``x/{a,b}`` as x/a and x/b."""
    _, _, table = page.partition("\n## Source tree\n")
    cells = [line.split("|")[1] for line in table.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    found = []
    for name in itertools.chain.from_iterable(re.findall(r"`([^`]+)`", cell) for cell in cells):
        before, _, inside = name.partition("{")
        found += [before + one for one in inside.rstrip("}").split(",")]
    return found


def differences(page: str, packages: Set[str]) -> list[str]:
    listed = listed_in(page)
    twice = {name for name in listed if listed.count(name) > 1}
    of_product = {name for name in listed if name.split("/")[0] in PACKAGES}
    wrong = [f"{name} is missing" for name in sorted(packages - of_product)]
    return [
        *wrong,
        *(f"{name} is no package" for name in sorted(of_product - packages)),
        *(f"{n} twice" for n in twice),
    ]


def test_the_tree_of_contributing_is_complete() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert differences(page, packages_in(ROOT)) == []
    assert [name for name in listed_in(page) if not (ROOT / name).is_dir()] == []


def test_a_tree_that_is_not_complete_is_noticed() -> None:
    page = "# Page\n\n## Source tree\n\n| a | b |\n|---|---|\n| `worker`, `worker/{io,gone}` | x |\n| `docs` | x |\n"
    assert differences(page, {"worker", "worker/io", "server"}) == ["server is missing", "worker/gone is no package"]
