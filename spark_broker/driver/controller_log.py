"""The controller's log, sent to the driver: a handler that never makes the controller wait."""

from __future__ import annotations

import logging
import logging.handlers
import queue
from collections.abc import Callable

from spark_broker.broker.log_format import fields_of
from spark_broker.driver.controller_pipe import LogLine
from spark_broker.threads import BeginAgain, begin

MAX_WAITING_LINES = 10_000
"""At most this many lines wait while the driver does not read: it is frozen, or in a call that lets no thread run."""

CLOSE_TIMEOUT_S = 2.0

_TRACEBACKS = logging.Formatter()


class PipeHandler(logging.handlers.QueueHandler):
    """Gives lines to a thread of its own, which calls `write`. Lines that find no room are counted and left out."""

    def __init__(self, write: Callable[[LogLine], None]) -> None:
        self._lines: queue.Queue[LogLine | None] = queue.Queue(MAX_WAITING_LINES)
        super().__init__(self._lines)
        self._write = write
        self._left_out = 0
        self._writer = begin("log", BeginAgain(), self._write_all)

    def prepare(self, record: logging.LogRecord) -> LogLine:
        fields = {name: value for name, value in fields_of(record).items() if name != "message"}
        traceback = "" if record.exc_info is None else _TRACEBACKS.formatException(record.exc_info)
        return LogLine(record.levelno, record.getMessage(), fields, traceback)

    def enqueue(self, record: LogLine) -> None:  # type: ignore[override]
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self._left_out += 1

    def drain(self) -> None:
        """Write what waits, as far as the driver takes it. Nothing may be logged after this."""
        try:
            self._lines.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._writer.join(CLOSE_TIMEOUT_S)

    def _write_all(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                left_out, self._left_out = self._left_out, 0
                if left_out:
                    text = f"{left_out} lines are left out: the driver did not read them"
                    self._write(LogLine(logging.WARNING, text))
                self._write(line)
        except OSError:
            return  # the driver is gone, and this process ends next
