"""The end of a Python process of Spark's: one that plans a query or a stream's batches, or a task's worker.

Spark has what it wanted, or nobody wants the rest (`show`, `limit`, a query that is stopped), and closes the socket.
The last word of the process then fails, and Python would print the traceback of that, though nothing went wrong.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import cache
from types import TracebackType


def is_worker() -> bool:
    """Whether this process is a Python worker of Spark's: it runs `python -m pyspark.daemon` or a worker's module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")


@cache
def end_in_silence() -> None:
    """Print nothing of a broken pipe at the end of this process, if it is one of Spark's."""
    if not is_worker():
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
