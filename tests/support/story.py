"""Steps of a long test, which a failure names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def step(name: str) -> Iterator[None]:
    """Whatever is raised in the block says in which step it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"In the step: {name}")
        raise
