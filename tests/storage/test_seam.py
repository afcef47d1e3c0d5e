"""Only `storage/filesystem.py` touches the machine: simulated crashes would not reach code that bypasses it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

STORAGE = Path(__file__).parents[2] / "spark_broker" / "storage"
SEAM = "filesystem.py"

FORBIDDEN_MODULES = frozenset(
    ("fcntl", "glob", "io", "mmap", "random", "select", "shutil", "signal", "socket", "subprocess", "tempfile")
) | {"time", "uuid"}
PATH_METHODS = frozenset(
    (
        "chmod",
        "exists",
        "expanduser",
        "glob",
        "hardlink_to",
        "is_dir",
        "is_file",
        "is_symlink",
        "iterdir",
        "lstat",
        "mkdir",
    )
) | {
    "open",
    "read_bytes",
    "read_text",
    "rename",
    "resolve",
    "rglob",
    "rmdir",
    "samefile",
    "stat",
    "symlink_to",
    "touch",
}
PATH_METHODS |= {"unlink", "write_bytes", "write_text", "absolute", "cwd", "home"}
FILE_SYSTEMS = frozenset({"fs", "_fs"})
NUMPY_AND_ARROW = frozenset({"fromfile", "tofile", "memmap", "memory_map", "OSFile", "input_stream", "output_stream"})


def violations(source: str) -> list[str]:
    """`line: what` for each use of the machine that bypasses the seam."""
    bypasses = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            bypasses += [f"{node.lineno}: {a.name}" for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES]
            bypasses += [f"{node.lineno}: os as {a.asname}" for a in node.names if a.name == "os" and a.asname]
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in FORBIDDEN_MODULES | {"os"}:
                bypasses.append(f"{node.lineno}: from {node.module}")
        elif isinstance(node, ast.Attribute):
            bypasses += [f"{node.lineno}: {ast.unparse(node)}"] if _goes_around(node) else []
        elif isinstance(node, ast.Name) and node.id == "open":
            bypasses.append(f"{node.lineno}: open")
    return bypasses


def _goes_around(node: ast.Attribute) -> bool:
    owner = node.value
    if isinstance(owner, ast.Name) and owner.id == "os":
        return not (node.attr.startswith("O_") or node.attr == "register_at_fork")
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return node.attr in NUMPY_AND_ARROW or (node.attr in PATH_METHODS and name not in FILE_SYSTEMS)


@pytest.mark.parametrize("path", sorted(STORAGE.glob("*.py")), ids=lambda path: path.name)
def test_storage_reaches_the_machine_through_its_file_system(path: Path) -> None:
    if path.name != SEAM:
        assert violations(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.open('x', 0)",
        "import os\nread = os.pread",
        "import os.path as p\nimport os as o",
        "from os import fsync",
        "import shutil",
        "from uuid import uuid4",
        "import time\ntime.monotonic()",
        "path.read_bytes()",
        "self.path.unlink()",
        "(directory / 'x').exists()",
        "Path('x').stat().st_size",
        "open('x')",
        "directory.glob('*')",
        "np.fromfile('x')",
        "pa.memory_map('x')",
    ],
)
def test_a_way_around_is_caught(source: str) -> None:
    assert violations(source)


@pytest.mark.parametrize(
    "source",
    ["import os\nflags = os.O_RDWR", "fs.read_bytes(p)", "self._fs.unlink(p)", "path.with_name('x').parent.name"],
)
def test_the_seam_itself_is_not_accused(source: str) -> None:
    assert violations(source) == []
