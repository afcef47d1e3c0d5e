"""The end of a process of Spark that plans a query, or a stream's batches.

Spark has what it wanted, and closes the socket. Over a Unix socket the last word of the process then fails, and Python
would print the traceback of that: after nearly every query, though nothing went wrong.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from functools import cache
from types import TracebackType


@cache
def end_in_silence() -> None:
    """Print nothing of a broken pipe at the end of this process. Only in a process that Spark speaks with over a Unix
    socket, and that does nothing for anybody else: not in a task's."""
    if os.environ.get("PYTHON_UNIX_DOMAIN_ENABLED", "").lower() != "true":
        return
    traceback.print_exc = _unless_broken_pipe(traceback.print_exc)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, BrokenPipeError):
            previous(kind, error, trace)

    sys.excepthook = hook


def _unless_broken_pipe(show: Callable[..., None]) -> Callable[..., None]:
    def shown(*arguments: object, **keywords: object) -> None:
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            show(*arguments, **keywords)

    return shown
