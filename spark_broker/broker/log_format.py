"""How lines of the log look: as text for people, or as JSON, one object a line, for machines.

A line about a replica, session or call has fields. It is logged with a mapping of its fields, and its text is made of
the same mapping: `logger.info("%(topic_partition)s: truncated to %(offset)d", {...})`. So text and fields always agree,
and any other handler of Python's `logging` finds the fields as `record.args`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from spark_broker.times import shown
from spark_broker.visible import visible

TEXT = "text"
JSON = "json"

TEXT_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"

OWN_KEYS = ("time", "level", "logger", "process", "thread", "message", "error")
"""The keys of every line of JSON (`error` only with a traceback). No field may have one of these names."""

_encoder = msgspec.json.Encoder(enc_hook=str)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The fields of a line, by name; none if it has none."""
    arguments = record.args
    return {str(name): value for name, value in arguments.items()} if isinstance(arguments, Mapping) else {}


def log_fields(
    logger: logging.Logger, level: int, text: str, fields: Mapping[str, object], traceback: str = ""
) -> None:
    """Log a text that is complete, with these fields, and with the traceback of another process."""
    if not logger.isEnabledFor(level):
        return
    file, line, function, _ = logger.findCaller(stacklevel=2)
    arguments = ({**fields, "message": text},)
    record = logger.makeRecord(logger.name, level, file, line, "%(message)s", arguments, None, function)
    record.exc_text = traceback or None
    logger.handle(record)


class TextFormatter(logging.Formatter):
    """Lines for people, with the time in UTC: `2026-01-31 12:00:00.123Z`, as the command line shows times.

    A message is one line, whatever names a client gave: else it could write lines that look like ours. A traceback
    follows as it is.
    """

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return shown(datetime.fromtimestamp(record.created, UTC))

    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible(super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """One line of JSON: `OWN_KEYS`, then the fields. `time` is UTC."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in fields_of(record).items() if name not in OWN_KEYS}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        elif record.exc_text:
            line["error"] = record.exc_text
        return _encoder.encode(line).decode()


def formatter(log_format: str, text_format: str = TEXT_FORMAT) -> logging.Formatter:
    """The formatter that the setting `log.format` names."""
    return JsonFormatter() if log_format == JSON else TextFormatter(text_format)
