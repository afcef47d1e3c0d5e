"""What Spark's exceptions say, in one line: pages of a plan, and of frames, come after it."""

from __future__ import annotations

import re
from typing import Any

SAID_MAX = 2000

_PAGES = re.compile(r"\s*SQLSTATE: |\n\s*at |\n\s*JVM stacktrace|\n\s*== |\n\s*'?\+?[:!]?[+-]? ?[A-Z]\w+ \[|;\s*\n")
"""Where the pages begin."""

_CAUSES_MAX = 20


def of_spark() -> tuple[type[Exception], ...]:
    """The exceptions that Spark's calls raise. Java's own, of a lost executor or a file system, come as Py4J's."""
    from pyspark.errors import PySparkException

    try:
        from py4j.protocol import Py4JJavaError
    except ModuleNotFoundError:  # a client of Spark Connect alone
        return (PySparkException,)
    return PySparkException, Py4JJavaError


def said(error: Exception) -> str:
    """What the exception says: PySpark's, or a Java exception that Py4J hands out."""
    java = getattr(error, "java_exception", None)
    return _text(str(error) if java is None else str(java.toString())) or type(error).__name__


def root_cause(error: Exception) -> str:
    """` (cause: ...)`, what the last cause of a Java exception says; empty: there is none, or the first line says it.

    Spark's wrappers do not say it: no space on a disk is "Task failed while writing rows".
    """
    java: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    causes: list[str] = []
    while hasattr(java, "getCause") and len(causes) < _CAUSES_MAX:
        lines = str(java.toString()).splitlines()
        causes.append(lines[0][:500] if lines else "")
        java = java.getCause()
    return f" (cause: {causes[-1]})" if len(causes) > 1 and causes[-1] not in causes[0] else ""


def _text(text: str) -> str:
    end = _PAGES.search(text)
    lines = (line.strip() for line in text[: end.start() if end else None].splitlines())
    return " ".join(line for line in lines if line)[:SAID_MAX]
