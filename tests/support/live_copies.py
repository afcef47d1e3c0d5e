"""Copies of directories whose processes go on: what is gone before its turn is not in the copy."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path


def copy_live(source: Path, target: Path) -> None:
    """Copy a directory. Its process makes temporary files and renames them meanwhile."""
    shutil.copytree(source, target, copy_function=_copy)


def _copy(source: str, target: str) -> None:
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)
