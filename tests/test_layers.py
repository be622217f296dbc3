"""The import rules and the shape of the tree, checked with ast; nothing is imported to check it."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import kind_names, operator_tables, size

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "npucompile"

# What each folder may import of the project, besides itself. Nobody imports tools.
LAW: dict[str, tuple[str, ...]] = {
    "graphs": (),
    "models": ("graphs",),
    "lowering": ("graphs",),
    "runtime": (
        "lowering.artifact",
        "lowering.device",
        "lowering.backend",
        "lowering.executable",
        "lowering.switches",
        "graphs.sizes",
        "graphs.types",
        "graphs.errors",
        "graphs.compile_count",
        "graphs.steps",
    ),
    "server": ("runtime", "graphs.errors"),
    "tools": ("graphs", "models", "lowering", "runtime", "server"),
}

# What each folder may import from outside, besides the standard library; otherwise the dependencies of pyproject.toml.
OUTSIDE: dict[str, tuple[str, ...]] = {"graphs": ("torch",)}

# Further imports of files under a folder: the converter to Ascend graphs, its protobuf messages, and a reader of ELF libraries.
OUTSIDE_BELOW = {
    "lowering/ascend/": ("torch_npu", "torchair", "google", "elftools", "vllm_ascend", "sgl_kernel_npu"),
    "runtime/kv_transfer/mooncake.py": ("mooncake",),
    "server/pictures/": ("PIL", "av"),
    "server/telemetry/tracing.py": ("opentelemetry",),
    # They run in the Python environments of these engines, and beside a checkout of llama.cpp.
    "tools/lab/peers/adapters/": ("llama_cpp", "numpy", "openvino", "openvino_genai", "vllm"),
    "tools/lab/peers/gguf.py": ("convert_hf_to_gguf",),
}

# Folders whose files may also use these extras: benchmarks and trainers compare with other people's code, and commands draw
# and fetch.
OPTIONAL_OUTSIDE = {"tools": ("test", "plots", "hub")}

ENVIRONMENT_READERS = ("__init__.py", "tools/cli.py")
ENVIRONMENT_NAMES = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")

# The budget is 400; the rest is slack for files that are about to be split.
HARD_LIMIT_LINES = 450

# Rooms that are reached by one file; the laboratory may import the adviser, and is in the repository and not in the wheel.
LABORATORY = "tools/lab/"
DOORS = {LABORATORY: "tools/laboratory.py", "tools/advisor/": "tools/advice.py", "tools/commands/": "tools/cli.py"}

# Folders that are tables: one parametrised test walks all their files.
TABLE_TESTS = {
    "graphs/ops": "tests/graphs/ops/test_ops.py",
    "graphs/passes": "tests/graphs/passes/test_passes.py",
    "graphs/steps": "tests/graphs/steps/test_table.py",
    "tools/builder/settings": "tests/tools/builder/settings/test_table.py",
}

# Files that do something and have no test file of their own, and why.
UNTESTED = {
    "graphs/errors.py": "declares classes; the tests of who raises them read the messages",
}

# Floors of tools, from the ground: a room imports those below it. A file beside the rooms stands under its name.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("__init__", "advice", "byte_sizes", "cli", "child_process", "heap", "host", "laboratory", "locate", "notation", "progress", "facts"),
    ("settings", "agreement", "hub"),
    ("builder", "quantize"),
    ("artifact_model",),
    ("inspection",),
    ("ranks",),
    ("prove",),
    ("serve",),
    ("face",),
    ("bench",),
    ("advisor",),
    ("doctor",),
    ("commands",),
    ("lab",),
)

# Comparisons with and tables of names of kinds of steps, outside of the kinds' records. The number only falls: what is left are words that
# people type and read, sides of a pair and figures of a bench.
KIND_NAMES = 10

# Lines that a room may have, and words of the documents. Raising one is a line in a commit that says why.
BUDGETS: dict[str, int] = {
    "docs (words)": 45000,
    "graphs": 9653,
    "lowering": 2205,
    "lowering/artifact": 1174,
    "lowering/ascend": 20871,
    "lowering/backends": 2070,
    "lowering/cpp": 5104,
    "models": 12111,
    "runtime": 4602,
    "runtime/distributed": 1897,
    "runtime/kv_transfer": 2421,
    "runtime/scheduler": 3832,
    "runtime/steps": 665,
    "server": 705,
    "server/anthropic": 584,
    "server/chat": 865,
    "server/engine": 1243,
    "server/fleet": 794,
    "server/grammar": 461,
    "server/guard": 865,
    "server/openai": 2706,
    "server/pages": 331,
    "server/parsers": 1608,
    "server/pictures": 2059,
    "server/requests": 2182,
    "server/response": 1340,
    "server/siblings": 561,
    "server/socket": 950,
    "server/storage": 241,
    "server/telemetry": 361,
    "server/text": 682,
    "tests": 110648,
    "tools": 1537,
    "tools/advisor": 8225,
    "tools/agreement": 1469,
    "tools/bench": 2778,
    "tools/builder": 6245,
    "tools/commands": 2596,
    "tools/face": 863,
    "tools/inspection": 1183,
    "tools/lab": 2651,
    "tools/prove": 6023,
    "tools/quantize": 1196,
    "tools/ranks": 1819,
    "tools/serve": 1918,
}


# --- reading the tree ---


@dataclass(frozen=True)
class Import:
    """One import: the file's path, the line, and the dotted name of the imported module ("" where it cannot be read)."""

    path: str
    line: int
    target: str
    relative: bool


def sources(root: Path) -> list[str]:
    """Paths of the package's Python files, relative to the root."""
    return sorted(p.relative_to(root).as_posix() for folder in LAW for p in (root / folder).rglob("*.py"))


def parse(root: Path, path: str) -> ast.Module:
    return ast.parse((root / path).read_text(encoding="utf-8"), filename=path)


def is_module(root: Path, dotted: str) -> bool:
    place = root.joinpath(*dotted.split(".")[1:])
    return dotted.split(".")[0] == PACKAGE and (place.is_dir() or place.with_name(f"{place.name}.py").is_file())


def resolve(path: str, level: int, name: str) -> str:
    """The absolute name of a relative import; "" when it climbs out of the package."""
    package = [PACKAGE, *Path(path).parent.parts]
    if level > len(package):
        return ""
    return ".".join([*package[: len(package) - level + 1], *([name] if name else [])])


def imports(root: Path, path: str) -> tuple[Import, ...]:
    return read_imports(root, path, (root / path).read_text(encoding="utf-8"))


@functools.cache
def read_imports(root: Path, path: str, text: str) -> tuple[Import, ...]:
    """Imports of a file, read once for all laws."""
    return tuple(imports_in(root, path, ast.parse(text, filename=path)))


def imports_in(root: Path, path: str, tree: ast.Module) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(path, node.lineno, alias.name, relative=False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = node.level > 0
            base = resolve(path, node.level, node.module or "") if relative else node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(path, node.lineno, inner if is_module(root, inner) else base, relative)
        elif isinstance(node, ast.Call) and called_name(node.func) in ("import_module", "__import__"):
            yield dynamic_import(path, node)


def called_name(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def dynamic_import(path: str, node: ast.Call) -> Import:
    """An import by string, resolved by the literal start of the name (`f".backends.{name}"` imports from `backends`)."""
    first = node.args[0] if node.args else None
    if isinstance(first, ast.JoinedStr) and first.values:
        first = first.values[0]
    text = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
    name = text.lstrip(".")
    level = len(text) - len(name)
    target = resolve(path, level, name.rstrip(".")) if level else name.rstrip(".")
    return Import(path, node.lineno, target, relative=level > 0)


# --- the rules; each yields the breaches ---


def outside_allowed(root: Path, folder: str) -> set[str]:
    if folder in OUTSIDE:
        return set(OUTSIDE[folder])
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in OPTIONAL_OUTSIDE.get(folder, ()):
        wanted += project["optional-dependencies"].get(extra, [])
    return {re.split(r"[^A-Za-z0-9_.-]", requirement)[0].replace("-", "_") for requirement in wanted}


def import_breaches(root: Path) -> Iterator[str]:
    outside = {folder: outside_allowed(root, folder) for folder in LAW}
    for path in sources(root):
        folder = path.split("/")[0]
        for imported in imports(root, path):
            where = f"{path}:{imported.line}"
            top, _, inner = imported.target.partition(".")
            legal_outside = outside[folder] | {name for below, names in OUTSIDE_BELOW.items() if path.startswith(below) for name in names}
            if not imported.target:
                yield f"{where}: imports a module whose name cannot be read from the source"
            elif top != PACKAGE:
                if top not in sys.stdlib_module_names and top not in legal_outside:
                    yield f"{where}: {folder} imports {top}, which is neither the standard library nor one of {sorted(legal_outside)}"
            elif door := closed_door(path, f"{inner.replace('.', '/')}/"):
                yield f"{where}: imports {inner}, which is reached by {door} alone"
            elif not imported.relative:
                yield f"{where}: imports {imported.target} absolutely; inside the house imports are relative"
            elif inner and not any(inner == legal or inner.startswith(f"{legal}.") for legal in (folder, *LAW[folder])):
                yield f"{where}: {folder} imports {inner}; it may import {', '.join(LAW[folder]) or 'only itself'}"


def closed_door(path: str, imported: str) -> str:
    """The one file that may import what another file imports; "" where that may too."""
    return next((door for room, door in DOORS.items() if imported.startswith(room) and not path.startswith((room, LABORATORY, door))), "")


def environment_breaches(root: Path) -> Iterator[str]:
    for path in sources(root):
        if path in ENVIRONMENT_READERS:
            continue
        for node in ast.walk(parse(root, path)):
            names: list[str] = []
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names = [node.attr]  # whatever name os was imported under
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                names = [alias.name for alias in node.names]
            if isinstance(node, ast.Attribute | ast.ImportFrom) and not set(names).isdisjoint(ENVIRONMENT_NAMES):
                yield f"{path}:{node.lineno}: touches the environment; only {' and '.join(ENVIRONMENT_READERS)} may"


def tree_breaches(root: Path) -> Iterator[str]:
    """Packages in pyproject.toml equal the folders with sources, and nothing else at the root is Python."""
    tool = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    listed = tool["packages"]
    packages = {path: ".".join([PACKAGE, *Path(path).parent.parts]) for path in sources(root)}
    folders = {PACKAGE} | set(packages.values())
    laboratory = {package for path, package in packages.items() if path.startswith(LABORATORY)}
    for package in sorted(laboratory & set(listed)):
        yield f"package {package} is the laboratory, which is not in the wheel, and is in pyproject.toml"
    for package in sorted(folders - laboratory - set(listed)):
        yield f"package {package} is in the tree but not in pyproject.toml"
    for package in sorted(set(listed) - folders):
        yield f"package {package} is in pyproject.toml but not in the tree"
    if len(set(listed)) != len(listed):
        yield f"pyproject.toml lists a package twice: {sorted(listed)}"
    for package in sorted(folders):
        if not root.joinpath(*package.split(".")[1:], "__init__.py").is_file():
            yield f"package {package} has no __init__.py"
    for path in sorted(root.iterdir()):
        if path.suffix == ".py" and path.name != "__init__.py":
            yield f"{path.name}: the root holds no Python file besides __init__.py"
        elif path.is_dir() and path.name not in LAW and (path / "__init__.py").exists():
            yield f"{path.name}/: the house has the packages {', '.join(LAW)} and no other"


def length_breaches(root: Path) -> Iterator[str]:
    for path in sources(root):
        lines = len((root / path).read_text(encoding="utf-8").splitlines())
        if lines > HARD_LIMIT_LINES:
            yield f"{path}: {lines} lines, at most {HARD_LIMIT_LINES}"


def does_something(tree: ast.Module) -> bool:
    """Whether a module has a function or method with a body; records, tables, protocols and re-exports have none."""

    def is_statement(node: ast.stmt) -> bool:
        return not isinstance(node, ast.Pass) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))

    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return any(is_statement(statement) for function in functions for statement in function.body)


def mirror_breaches(root: Path) -> Iterator[str]:
    """Every source file that does something has the test file that its path names."""
    for path in sources(root):
        folder, _, file = path.rpartition("/")
        if file == "__init__.py" or not does_something(parse(root, path)):
            continue
        own = f"tests/{folder}/test_{file}"
        legal = [own, TABLE_TESTS[folder]] if folder in TABLE_TESTS else [own]
        tested = any((root / test).is_file() for test in legal)
        if tested and path in UNTESTED:
            yield f"{path}: is tested and needs no exemption"
        elif not tested and path not in UNTESTED:
            yield f"{path}: has no {' or '.join(legal)}"
    for path in sorted(UNTESTED):
        if path not in sources(root):
            yield f"{path}: is exempt and does not exist"
        elif not does_something(parse(root, path)):
            yield f"{path}: holds only data and needs no exemption"


def imported_files(root: Path) -> dict[str, set[str]]:
    """The files that each file imports, whether or not it runs the import."""
    paths, files = set(sources(root)), {}
    for path in paths:
        targets = {imported.target.partition(".")[2].replace(".", "/") for imported in imports(root, path)}
        files[path] = {file for target in targets for file in (f"{target}.py", f"{target}/__init__.py") if file in paths} - {path}
    return files


def circles(edges: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Largest sets of files of which each reaches all others."""
    reached: dict[str, set[str]] = {}
    for path in edges:
        seen, waiting = set[str](), list(edges[path])
        while waiting:
            if (file := waiting.pop()) not in seen:
                seen.add(file)
                waiting += edges[file]
        reached[path] = seen
    return sorted({tuple(sorted(file for file in reached[path] if path in reached[file])) for path in edges if path in reached[path]})


def circle_breaches(root: Path) -> Iterator[str]:
    for circle in circles(imported_files(root)):
        yield f"{', '.join(circle)}: import each other in a circle; what several of them need goes to a file below them"


def room_breaches(root: Path) -> Iterator[str]:
    """Rooms of tools import rooms of lower floors; doors open upward."""
    floors = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    for path, files in sorted(imported_files(root).items()):
        if not path.startswith("tools/"):
            continue
        behind = next((room for room, door in DOORS.items() if path == door), path)
        room = path.split("/")[1].removesuffix(".py")
        for other in sorted({file.split("/")[1].removesuffix(".py") for file in files if file.startswith("tools/")} - {room, "__init__"}):
            if not {room, other} <= set(floors):
                yield f"{path}: of {room} and {other}, {' and '.join({room, other} - set(floors))} has no floor in FLOORS"
            elif floors[other] >= floors[room] and f"tools/{other}/" != behind:
                yield f"{path}: tools/{room} imports tools/{other}, which is not below it"


def encoding_breaches(root: Path) -> Iterator[str]:
    """What is done with either file of a graph for NPUs is in the record of its encoding (lowering/ascend/shipped.py)."""
    for path in sources(root):
        for node in ast.walk(parse(root, path)):
            if isinstance(node, ast.Call) and called_name(node.func) == "isinstance" and re.search(r"\b(Acl|Ge)File\b", ast.unparse(node)):
                yield f"{path}:{node.lineno}: asks which file a graph is of; its encoding's record says what to do"


def operator_breaches(root: Path) -> Iterator[str]:
    tables = list(operator_tables.tables(root, sources(root)))
    if tables:
        yield "\n".join([f"{len(tables)} tables name NPU operators outside of their records, where none may:", *tables])


def kind_breaches(root: Path) -> Iterator[str]:
    found, most = list(kind_names.mentions(root, sources(root))), KIND_NAMES if root == ROOT else 0
    if len(found) > most:
        yield "\n".join([f"{len(found)} lines ask for names of kinds of steps, where {most} may; records say what they need:", *found])
    elif len(found) < most:
        yield f"KIND_NAMES is {most} and {len(found)} lines ask for names of kinds; lower it"


def class_breaches(root: Path) -> Iterator[str]:
    """A name is of one class, but for the configuration that each family of models has."""
    defined: dict[str, list[str]] = {}
    for path in sources(root):
        for node in parse(root, path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name != "Config":
                defined.setdefault(node.name, []).append(path)
    yield from (f"{name}: a class of {' and of '.join(paths)}" for name, paths in sorted(defined.items()) if len(paths) > 1)


def budget_breaches(root: Path) -> Iterator[str]:
    sizes = size.present(root)
    budgets = BUDGETS if root == ROOT else dict.fromkeys(sizes, 50)
    for room, lines in sorted(sizes.items()):
        if lines > budgets.get(room, 0):
            budget = f"its budget is {budgets.get(room, 0)}; raising it in BUDGETS is a line in a commit that says why"
            yield f"{room}: has {lines} {'words' if room == size.DOCS else 'lines'}, {budget}"
    for room in sorted(set(budgets) - set(sizes)):
        yield f"{room}: has a budget and does not exist; take it out of BUDGETS"


LAWS = (
    *(import_breaches, environment_breaches, tree_breaches, length_breaches, mirror_breaches),
    *(circle_breaches, room_breaches, encoding_breaches, operator_breaches, kind_breaches, class_breaches, budget_breaches),
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_house_keeps(law: Callable[[Path], Iterator[str]]) -> None:
    broken = list(law(ROOT))
    assert not broken, "\n" + "\n".join(broken)


def test_names_of_operators_are_read() -> None:
    assert {"FusedInferAttentionScore", "npu.npu_swiglu.default", "npu_swiglu"} <= operator_tables.names(ROOT)


def test_every_folder_is_read() -> None:
    assert {path.split("/")[0] for path in sources(ROOT)} == set(LAW)
    assert "graphs/types.py" in sources(ROOT)


# --- the rules catch what they forbid ---

PYPROJECT = """
[project]
dependencies = ["torch==2.13.0", "numpy>=2.0"]
[project.optional-dependencies]
test = ["transformers==5.23.0"]
[tool.setuptools]
packages = ["npucompile", "npucompile.graphs", "npucompile.graphs.ops", "npucompile.models", "npucompile.lowering",
            "npucompile.lowering.artifact", "npucompile.lowering.ascend", "npucompile.lowering.ascend.toolchain",
            "npucompile.runtime", "npucompile.server", "npucompile.tools", "npucompile.tools.advisor", "npucompile.tools.serve"]
"""

CLEAN = {
    "pyproject.toml": PYPROJECT,
    "__init__.py": "import os\nos.environ.setdefault('A', '0')\n__version__ = '0'\n",
    "graphs/__init__.py": "",
    "graphs/errors.py": "import math\nimport torch.nn as nn\nfrom torch import fx\ndef f():\n    return 1\n",
    "graphs/types.py": "from .errors import E\nfrom . import errors\nclass A:\n    x: int\nclass _B:\n    x: int\n",
    "graphs/ops/__init__.py": "from ..types import A\nfrom .. import errors\n",
    "graphs/ops/linear.py": "from ...graphs.types import A\ndef linear():\n    return A\n",
    "models/__init__.py": "from ..graphs import types\nimport numpy as np\n",
    "lowering/__init__.py": "import importlib\ndef f(name):\n    return importlib.import_module(f'.backends.{name}', __package__)\n",
    "lowering/artifact/__init__.py": "",
    "lowering/artifact/manifest.py": "from ... import __version__\n",
    "lowering/executable.py": "",
    "lowering/other.py": "",
    "lowering/ascend/__init__.py": "",
    "lowering/ascend/toolchain/__init__.py": "",
    "lowering/ascend/toolchain/harness.py": "import torch_npu\n__import__('torchair.core')\nfrom google.protobuf import x\n",
    "runtime/__init__.py": "from ..lowering.artifact.manifest import x\nfrom ..lowering import artifact, executable\n"
    "from ..graphs.types import A\n",
    "server/__init__.py": "def f():\n    from ..runtime import x\n    from ..graphs.errors import E\n",
    "tools/__init__.py": "from .. import graphs, lowering, models, runtime, server\nimport transformers\n",
    "tools/cli.py": "import os\nHOME = os.environ['HOME']\n",
    "tools/serve/__init__.py": "",
    "tools/serve/rank.py": "from ..cli import HOME\n",
    "lowering/ascend/operators/legality/sums.json": '{"facts": [{"operators": ["NpuAdd", "NpuSub"]}], "torch": []}',
    "tests/graphs/test_types.py": "",
    "tests/graphs/ops/test_ops.py": "",
    "tests/lowering/artifact/test_manifest.py": "",
    "tests/lowering/test_executable.py": "",
    "tests/lowering/test_other.py": "",
    "tests/lowering/ascend/toolchain/test_harness.py": "",
    "tools/advisor/__init__.py": "",
    "tools/lab/__init__.py": "from ..advisor import x\n",
    "tools/lab/peers/__init__.py": "from .. import peers\nfrom ...lab import peers\n",
    "tests/tools/test_cli.py": "",
}


def breaches(root: Path, changes: dict[str, str], laws: Sequence[Callable[[Path], Iterator[str]]] = LAWS) -> list[str]:
    for path, text in (CLEAN | changes).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return [breach for law in laws for breach in law(root)]


def test_a_clean_tree_is_clean(tmp_path: Path) -> None:
    assert breaches(tmp_path, {}) == []


IMPORT_BREACHES = [
    ("graphs/types.py", "import numpy\n", "graphs imports numpy"),
    ("graphs/types.py", "from ..models import x\n", "graphs imports models"),
    ("graphs/types.py", "from .. import lowering\n", "graphs imports lowering"),
    ("graphs/ops/linear.py", "from ...runtime.pages import x\n", "graphs imports runtime.pages"),
    ("models/__init__.py", "from ..lowering.artifact import x\n", "models imports lowering.artifact"),
    ("models/__init__.py", "import transformers\n", "models imports transformers"),
    ("lowering/artifact/manifest.py", "from ...models import x\n", "lowering imports models"),
    ("lowering/artifact/manifest.py", "import torch_npu\n", "lowering imports torch_npu"),
    ("lowering/other.py", "import importlib\nimportlib.import_module('torchair')\n", "lowering imports torchair"),
    ("lowering/ascend/toolchain/harness.py", "import yaml\n", "lowering imports yaml"),
    ("lowering/ascend/toolchain/harness.py", "from ....models import x\n", "lowering imports models"),
    ("runtime/__init__.py", "import torch_npu\n", "runtime imports torch_npu"),
    ("lowering/artifact/manifest.py", "if TYPE_CHECKING:\n    from ...runtime import x\n", "lowering imports runtime"),
    ("runtime/__init__.py", "from ..lowering.other import x\n", "runtime imports lowering.other"),
    ("runtime/__init__.py", "from ..lowering import other\n", "runtime imports lowering.other"),
    ("runtime/__init__.py", "from ..lowering import Name\n", "runtime imports lowering;"),
    ("runtime/__init__.py", "from .. import graphs\n", "runtime imports graphs;"),
    ("runtime/__init__.py", "from ..server import x\n", "runtime imports server"),
    ("server/__init__.py", "def f():\n    from ..lowering.artifact import x\n", "server imports lowering.artifact"),
    ("server/__init__.py", "from ..graphs.types import x\n", "server imports graphs.types"),
    ("server/__init__.py", "from ..tools import cli\n", "server imports tools.cli"),
    ("tools/cli.py", "import yaml\n", "tools imports yaml"),
    ("tools/cli.py", "import npucompile.graphs\n", "absolutely"),
    ("tools/cli.py", "from npucompile.graphs.types import A\n", "absolutely"),
    ("tools/cli.py", "from npucompile import graphs\n", "absolutely"),
    ("tools/cli.py", "from ... import x\n", "cannot be read"),
    ("tools/cli.py", "from .advisor import x\n", "imports tools.advisor, which is reached by tools/advice.py alone"),
    ("tools/cli.py", "from .lab.peers import x\n", "imports tools.lab.peers, which is reached by"),
    ("graphs/types.py", "import importlib\nimportlib.import_module('npucompile.models.step')\n", "absolutely"),
    ("graphs/types.py", "from importlib import import_module\nimport_module('..models.step', __package__)\n", "graphs imports models.step"),
    ("graphs/types.py", "import importlib\nimportlib.import_module(f'..models.{name}', __package__)\n", "graphs imports models"),
    ("graphs/types.py", "import importlib\nimportlib.import_module(name)\n", "cannot be read"),
    ("graphs/types.py", "__import__('numpy')\n", "graphs imports numpy"),
]

OTHER_BREACHES = [
    ("graphs/types.py", "import os\nx = os.environ['A']\n", "graphs/types.py:2: touches the environment"),
    ("graphs/types.py", "import os as o\nx = o.getenv('A')\n", "graphs/types.py:2: touches the environment"),
    ("graphs/types.py", "from os import environ\n", "graphs/types.py:1: touches the environment"),
    ("models/bundled/__init__.py", "", "npucompile.models.bundled is in the tree but not in"),
    ("pyproject.toml", PYPROJECT.replace("packages = [", "packages = ['npucompile.gone', "), "npucompile.gone is in pyproject.toml but"),
    ("pyproject.toml", PYPROJECT.replace("packages = [", "packages = ['npucompile.tools', "), "lists a package twice"),
    ("graphs/passes/first.py", "", "package npucompile.graphs.passes has no __init__.py"),
    (
        "pyproject.toml",
        PYPROJECT.replace("packages = [", "packages = ['npucompile.tools.lab', "),
        "package npucompile.tools.lab is the laboratory, which is not in the wheel",
    ),
    ("setup.py", "", "setup.py: the root holds no Python file"),
    ("extra/__init__.py", "", "extra/: the house has the packages"),
    ("lowering/artifact/manifest.py", "x = 1\n" * (HARD_LIMIT_LINES + 1), f"{HARD_LIMIT_LINES + 1} lines, at most {HARD_LIMIT_LINES}"),
    ("lowering/new.py", "def f():\n    return 1\n", "lowering/new.py: has no tests/lowering/test_new.py"),
    ("graphs/errors.py", "class E(Exception):\n    def __str__(self): ...\n", "graphs/errors.py: holds only data and needs no exemption"),
    ("tests/graphs/test_errors.py", "", "graphs/errors.py: is tested and needs no exemption"),
    (
        "graphs/errors.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .types import A\n",
        "graphs/errors.py, graphs/types.py: import each other in a circle",
    ),
    ("tools/locate.py", "from .serve.rank import x\n", "tools/locate.py: tools/locate imports tools/serve, which is not below it"),
    ("tools/other/a.py", "from ..serve import rank\n", "other has no floor in FLOORS"),
    ("lowering/artifact/manifest.py", "x = 1\n" * 100, "lowering/artifact: has 100 lines, its budget is 50; raising it"),
    ("models/__init__.py", "def f(bucket):\n    return bucket.kind == 'decode'\n", "1 lines ask for names of kinds of steps, where 0 may"),
    ("models/__init__.py", "class A:\n    x: int\n\n\nclass _B:\n    x: int\n", "A: a class of graphs/types.py and of models/__init__.py"),
    ("models/__init__.py", "KINDS = ('decode', 'prefill')\n", "models/__init__.py:1: ('decode', 'prefill')"),
    ("models/__init__.py", "def f(b):\n    return kinds_of_kind(b, 'prefill')\n", "models/__init__.py:2: kinds_of_kind(b, 'prefill')"),
    ("lowering/other.py", "def f(file):\n    return isinstance(file, x.GeFile | int)\n", "lowering/other.py:2: asks which file"),
    ("lowering/other.py", "TABLE = {'NpuAdd': 1, 'NpuSub': 2}\n", "1 tables name NPU operators outside of their records"),
]


@pytest.mark.parametrize(("path", "text", "message"), IMPORT_BREACHES + OTHER_BREACHES)
def test_a_breach_is_caught(tmp_path: Path, path: str, text: str, message: str) -> None:
    broken = breaches(tmp_path, {path: text})
    assert any(message in breach for breach in broken), broken


@pytest.mark.parametrize(("path", "text", "message"), IMPORT_BREACHES)
def test_an_import_breach_names_its_line(tmp_path: Path, path: str, text: str, message: str) -> None:
    (breach,) = breaches(tmp_path, {path: text}, [import_breaches])
    assert breach.startswith(f"{path}:{len(text.splitlines())}: ")


@pytest.mark.parametrize(
    "text",
    [
        "SIZES = {name: len(name) for name in ('a', 'b')}\n",
        "class Record:\n    size: int\n",
        "class P(Protocol):\n    def run(self) -> int:\n        'What it gives.'\n\n    async def stop(self): ...\n",
        "from .types import A\n",
    ],
    ids=["table", "record", "protocol", "re-export"],
)
def test_data_needs_no_test_file(tmp_path: Path, text: str) -> None:
    assert breaches(tmp_path, {"graphs/data.py": text}) == []


def test_a_table_needs_its_test(tmp_path: Path) -> None:
    breaches(tmp_path, {})
    (tmp_path / "tests/graphs/ops/test_ops.py").unlink()
    assert list(mirror_breaches(tmp_path)) == [
        "graphs/ops/linear.py: has no tests/graphs/ops/test_linear.py or tests/graphs/ops/test_ops.py"
    ]
