"""`pytest tests/stories --rewrite-stories` writes the traces that the commands give now; then look at the diff."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-stories", action="store_true", help="write the stories' traces instead of comparing")
