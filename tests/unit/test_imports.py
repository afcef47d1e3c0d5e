"""Imports go one way, and core/ and controller/ are pure. The checkers are checked on bad sources."""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

GROUPS = (
    (
        "errors",
        "pages",
        "ports",
        "model",
        "group_model",
        "troubles",
        "times",
        "digits",
        "addresses",
        "visible",
        "native_calls",
        "left_open",
        "process_limits",
        "short_pauses",
        "quiet_end",
        "threads",
        "interrupts",
    ),
    ("setting_values",),
    ("config", "protocol"),
    ("core", "controller"),
    ("storage", "transport"),
    ("broker", "driver", "client"),
    ("spark",),
    ("history",),
    ("cli", "testing", "jobs"),
)
"""A layer imports itself, the groups before its own, and inside its group only what `WITHIN_GROUP` allows."""

WITHIN_GROUP = {
    # Hints name pages.
    "errors": {"pages"},
    # A model may name errors and have times; a message may carry a setting; the controller may use core's values.
    "model": {"errors", "times", "addresses"},
    "group_model": {"errors", "model", "times"},
    "troubles": {"model"},
    "process_limits": {"errors"},
    "left_open": {"native_calls"},
    "threads": {"errors", "interrupts", "process_limits"},
    "protocol": {"config"},
    "controller": {"core"},
    # The driver ships the broker's entry function to executors. The only import across the three shells.
    "driver": {"broker"},
    # `simulate` and `check-history` are commands for what users can test with.
    "cli": {"testing"},
    "jobs": {"cli"},
}

STARTS_IT_ALL = {"driver/cluster.py": {"history"}}
"""A cluster starts its own schedule of tiering, which is made of clients."""

TOP = GROUPS[-1]
"""Only these may import from the facade `spark_broker` itself, which leads everywhere."""

PURE = ("core", "controller")
PURE_MODULES = (
    "client/cluster_view.py",
    "client/commit_queue.py",
    "client/consumer_effects.py",
    "client/consumer_machine.py",
    "client/history_turns.py",
    "history/attempt.py",
    "history/plan.py",
    "history/retention.py",
    "history/steps.py",
    "history/timetable.py",
    "client/fetch_decoder.py",
    "client/fetch_machine.py",
    "client/leader_channel.py",
    "client/leader_fetches.py",
    "client/partition_position.py",
    "client/partition_queue.py",
    "client/sender_effects.py",
    "client/sender_machine.py",
    "client/transaction_machine.py",
)
"""State machines and their data in a layer that is not pure."""

IMPURE_MODULES = (
    # clock, randomness, environment
    *("time", "random", "secrets", "os", "platform", "getpass", "tempfile"),
    # files and sockets
    *(
        "io",
        "pathlib",
        "shutil",
        "glob",
        "socket",
        "ssl",
        "select",
        "selectors",
        "fcntl",
        "mmap",
        "http",
        "urllib",
        "fsspec",
    ),
    # threads and processes
    *("threading", "_thread", "queue", "asyncio", "concurrent", "multiprocessing", "subprocess", "signal", "logging"),
    # ways around this check
    *("importlib", "ctypes", "runpy", "pyspark", "py4j"),
)
IMPURE_NAMES = (
    *("datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today"),
    *("uuid.uuid1", "uuid.uuid4", "uuid.getnode", "sys.argv", "sys.stdin", "sys.stdout", "sys.stderr"),
    *("numpy.random", "numpy.load", "numpy.save", "numpy.fromfile", "numpy.memmap"),
    *("pyarrow.flight", "pyarrow.fs", "pyarrow.dataset", "pyarrow.parquet"),
    *("pyarrow.memory_map", "pyarrow.OSFile", "pyarrow.input_stream", "pyarrow.output_stream"),
)
IMPURE_BUILTINS = ("open", "input", "print", "breakpoint", "exec", "eval", "__import__", "hash", "id")
"""A string's `hash` and an object's `id` differ from run to run: decisions that use them cannot be replayed."""


@dataclass(frozen=True)
class Imported:
    """`import module` or `from module import name`, with the absolute module and the line."""

    module: str
    name: str | None
    bound_as: str
    line: int

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def imports_of(tree: ast.AST, package: str) -> Iterator[Imported]:
    """Every import of a tree, also those inside functions and below TYPE_CHECKING. `package` resolves relative ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Imported(alias.name, None, alias.asname or alias.name.split(".")[0], node.lineno)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Imported(module, alias.name, alias.asname or alias.name, node.lineno)


def layer_of(imported: Imported) -> str | None:
    """The layer that an import reaches: `facade` for `spark_broker` itself, None for modules of other projects."""
    parts = imported.dotted.split(".")
    if parts[0] == "jobs":
        return "jobs"
    if parts[0] != "spark_broker":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in layers() else "facade"


def layers() -> tuple[str, ...]:
    return tuple(layer for group in GROUPS for layer in group)


def may_import(layer: str, target: str) -> bool:
    if target == "facade":
        return layer in TOP
    rank = {name: index for index, group in enumerate(GROUPS) for name in group}
    return layer == target or rank[target] < rank[layer] or target in WITHIN_GROUP.get(layer, ())


def direction_violations(source: str, layer: str, package: str, also: Collection[str] = ()) -> list[str]:
    """`line: what` for each forbidden import in `source`, a module of `layer` that may import `also` these layers."""
    return [
        f"{imported.line}: {layer} imports {target} ({imported.dotted})"
        for imported in imports_of(ast.parse(source), package)
        if (target := layer_of(imported)) is not None and target not in also and not may_import(layer, target)
    ]


def _is_at_or_below(dotted: str, prefixes: tuple[str, ...]) -> bool:
    return any(dotted == prefix or dotted.startswith(prefix + ".") for prefix in prefixes)


def _dotted_name(node: ast.expr, origins: dict[str, str]) -> str:
    """The full name of `a.b.c`, with `a` replaced by what it was imported as; empty for other expressions."""
    if isinstance(node, ast.Name):
        return origins.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = _dotted_name(node.value, origins)
        return f"{base}.{node.attr}" if base else ""
    return ""


def purity_violations(source: str, package: str = "spark_broker.core") -> list[str]:
    """`line: what` for each use of a clock, file, socket, thread, environment or unseeded randomness in `source`."""
    tree = ast.parse(source)
    imported = list(imports_of(tree, package))
    violations = [
        f"{statement.line}: imports {statement.dotted}"
        for statement in imported
        if _is_at_or_below(statement.module, IMPURE_MODULES) or _is_at_or_below(statement.dotted, IMPURE_NAMES)
    ]
    origins = {
        statement.bound_as: statement.dotted
        if statement.name or statement.bound_as != statement.module.split(".")[0]
        else statement.bound_as
        for statement in imported
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_at_or_below(_dotted_name(node, origins), IMPURE_NAMES):
            violations.append(f"{node.lineno}: uses {_dotted_name(node, origins)}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_BUILTINS:
            violations.append(f"{node.lineno}: calls {node.func.id}()")
    return violations


def modules() -> list[Path]:
    """Every module of the package and of jobs/."""
    return sorted([*(ROOT / "spark_broker").rglob("*.py"), *(ROOT / "jobs").rglob("*.py")])


def place_of(path: Path) -> tuple[str, str]:
    """Layer and package of a file: ("core", "spark_broker.core") for `spark_broker/core/replica.py`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    layer = "jobs" if parts[0] == "jobs" else parts[1]
    return layer, ".".join(parts[:-1])


@pytest.mark.slow
def test_every_layer_imports_only_what_is_before_it() -> None:
    violations = []
    for path in modules():
        if path == ROOT / "spark_broker" / "__init__.py":
            continue  # the facade: the subprocess test below checks what it loads
        layer, package = place_of(path)
        within = path.relative_to(ROOT).as_posix().removeprefix("spark_broker/")
        violations += [
            f"{path.relative_to(ROOT)}:{line}"
            for line in direction_violations(path.read_text(), layer, package, STARTS_IT_ALL.get(within, ()))
        ]
    assert violations == []


def import_cycle(imports: Mapping[str, Collection[str]]) -> list[str]:
    """The first cycle of imports that is found; empty when imports go one way."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        first_cycle = next((cycle for other in sorted(imports[module]) if (cycle := visit(other, [*path, module]))), [])
        done.add(module)
        return first_cycle

    return next((cycle for module in sorted(imports) if (cycle := visit(module, []))), [])


def imports_within(folder: str) -> dict[str, set[str]]:
    """For each module of a folder, the modules of that folder that it imports, also late but not only for types."""
    package = f"spark_broker.{folder.replace('/', '.')}"
    paths = {f"{package}.{path.stem}": path for path in (ROOT / "spark_broker" / folder).glob("*.py")}
    imports: dict[str, set[str]] = {}
    for name, path in paths.items():
        tree = ast.parse(path.read_text())
        at_runtime = ast.Module([node for node in tree.body if not _is_for_types(node)], [])
        reached = {part for imported in imports_of(at_runtime, package) for part in (imported.module, imported.dotted)}
        imports[name] = reached & paths.keys()
    return imports


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@pytest.mark.parametrize("folder", ["cli"])
def test_the_modules_of_a_folder_import_one_way(folder: str) -> None:
    imports = imports_within(folder)
    assert sum(map(len, imports.values())) > len(imports)
    assert import_cycle(imports) == []


def test_a_circle_of_imports_is_found() -> None:
    assert import_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert import_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_every_module_belongs_to_a_layer() -> None:
    places = {path: place_of(path)[0] for path in modules() if path != ROOT / "spark_broker" / "__init__.py"}
    assert {path: layer for path, layer in places.items() if layer not in layers()} == {}


@pytest.mark.parametrize("module", PURE_MODULES)
def test_the_clients_machines_touch_no_clock_file_socket_thread_or_environment(module: str) -> None:
    path = ROOT / "spark_broker" / module
    assert purity_violations(path.read_text(), place_of(path)[1]) == []


@pytest.mark.parametrize("layer", PURE)
def test_pure_layers_touch_no_clock_file_socket_thread_or_environment(layer: str) -> None:
    paths = sorted((ROOT / "spark_broker" / layer).rglob("*.py"))
    assert paths, f"spark_broker/{layer} has no module"
    violations = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in paths
        for line in purity_violations(path.read_text(), place_of(path)[1])
    ]
    assert violations == []


def test_the_data_source_module_imports_only_pyspark_at_module_level() -> None:
    """Spark imports every `pyspark_*` module unguarded: ours must not break a user's session."""
    tree = ast.parse((ROOT / "pyspark_spark_broker" / "__init__.py").read_text())
    top = ast.Module([node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)], [])
    roots = {imported.module.split(".")[0] for imported in imports_of(top, "pyspark_spark_broker")}
    assert roots <= {"__future__", "typing", "collections", "pyspark"}


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import spark_broker; from spark_broker import Producer, Consumer, Admin",
        "from spark_broker import NewTopic, TopicPartition",
        "import spark_broker.client",
    ],
)
def test_clients_load_neither_spark_nor_the_command_line(statement: str) -> None:
    unwanted = {"pyspark", "py4j", "typer", "rich", "click", "pandas", "delta"}
    assert loaded_after(statement) & unwanted == set()


def test_every_public_name_is_there() -> None:
    loaded_after(
        "from spark_broker import BrokerCluster, Admin, Producer, Consumer, NewTopic, TopicPartition, configure_spark"
    )


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("errors", "from spark_broker.model import TopicPartition"),
        ("core", "from spark_broker.storage.log import Log"),
        ("core", "import spark_broker.transport.client"),
        ("core", "from spark_broker import storage"),
        ("core", "from spark_broker import Producer"),
        ("core", "from ..storage import log"),
        ("core", "from .. import storage"),
        ("core", "def late():\n    from spark_broker.broker import shell"),
        ("core", "if TYPE_CHECKING:\n    from spark_broker.client import Producer"),
        ("storage", "from spark_broker.transport import client"),
        ("broker", "from spark_broker.driver import launcher"),
        ("broker", "from spark_broker.client import Producer"),
        ("driver", "from spark_broker.client import Admin"),
        ("client", "from spark_broker.broker import shell"),
        ("client", "from spark_broker.driver import launcher"),
        ("client", "import spark_broker"),
        ("spark", "import jobs.demo"),
        ("spark", "from spark_broker.cli import main"),
    ],
)
def test_an_import_against_the_direction_is_caught(layer: str, source: str) -> None:
    assert len(direction_violations(source, layer, f"spark_broker.{layer}")) == 1


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("core", "from spark_broker.model import TopicPartition\nfrom spark_broker import errors"),
        ("core", "from . import epochs\nfrom .epochs import EpochHistory\nfrom spark_broker.core import epochs"),
        ("driver", "from spark_broker.broker.main import run"),
        ("cli", "from spark_broker import Producer\nimport spark_broker.driver"),
        ("core", "import numpy as np\nimport dataclasses"),
    ],
)
def test_an_import_along_the_direction_is_allowed(layer: str, source: str) -> None:
    assert direction_violations(source, layer, f"spark_broker.{layer}") == []


@pytest.mark.parametrize(
    "source",
    [
        *(f"import {module}" for module in IMPURE_MODULES),
        *(f"from {module} import something" for module in IMPURE_MODULES),
        "import os.path",
        "from concurrent.futures import ThreadPoolExecutor",
        "def late():\n    import time",
        "import datetime\nnow = datetime.datetime.now()",
        "from datetime import datetime\nnow = datetime.now(tz=None)",
        "from datetime import datetime as moment\nnow = moment.utcnow()",
        "import datetime as dt\nclock = dt.date.today",
        "import uuid\nname = uuid.uuid4()",
        "from uuid import uuid4",
        "import numpy as np\nnp.random.default_rng()",
        "from numpy.random import default_rng",
        "import pyarrow.flight",
        "import pyarrow.flight as flight",
        "from pyarrow import flight",
        "import pyarrow as pa\npa.memory_map('x')",
        "import sys\nsys.stderr.write('x')",
        *(f"{name}('x')" for name in IMPURE_BUILTINS),
    ],
)
def test_an_impurity_is_caught(source: str) -> None:
    assert purity_violations(source)


@pytest.mark.parametrize(
    "source",
    [
        "from datetime import datetime, UTC\nepoch = datetime.fromtimestamp(0, UTC)",
        "import uuid\nname = uuid.UUID(int=1)",
        "import pyarrow as pa\nschema = pa.schema([])",
        "import numpy as np\nnp.zeros(3)",
        "def decide(time, now): return time.now() + now()",
        "class Log:\n    def open(self): ...\nLog().open()",
    ],
)
def test_pure_code_is_not_accused(source: str) -> None:
    assert purity_violations(source) == []


def test_the_checked_builtins_exist() -> None:
    assert [name for name in IMPURE_BUILTINS if not hasattr(builtins, name)] == []


def test_without_spark_the_driver_names_say_what_to_install() -> None:
    """`sys.modules[...] = None` makes Python treat a module as missing."""
    program = (
        "import sys; sys.modules['pyspark'] = None\n"
        "import spark_broker\n"
        "try:\n    spark_broker.BrokerCluster\n"
        "except spark_broker.errors.MissingDependencyError as error:\n    print(error)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "spark-broker[spark]" in run.stdout
