"""In which process an object was made: what a forked child inherits of connections does not work there."""

from __future__ import annotations

import os
from collections.abc import Callable

from spark_broker.errors import ForkedProcessError

_generation = 0
_after_fork: list[Callable[[], object]] = []


class Origin:
    """Of the object that holds it. A child that opens clients of its own can use them."""

    __slots__ = ("_generation",)

    def __init__(self) -> None:
        self._generation = _generation

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a child of the one in which the object was made."""
        return self._generation != _generation

    def check(self) -> None:
        """Raises ForkedProcessError in a child."""
        if self._generation != _generation:
            raise ForkedProcessError("this process was forked from the one in which this client was opened")


def after_fork(callback: Callable[[], object]) -> None:
    """Have every child of this process call this, before anything else happens in it."""
    _after_fork.append(callback)


def _forked() -> None:
    global _generation  # noqa: PLW0603
    _generation += 1
    for callback in _after_fork:
        callback()


os.register_at_fork(after_in_child=_forked)
