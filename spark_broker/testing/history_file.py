"""A history as a file: one event a line (JSON), so that a run can be judged again, elsewhere and later."""

from __future__ import annotations

from pathlib import Path

import msgspec

from spark_broker.errors import InvalidDataError
from spark_broker.protocol.wire import UNDECODABLE
from spark_broker.testing.history import Event, History

FORMAT = "spark-broker-history-1"
"""First line of the file. It changes with the meaning of an event."""

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def save_history(history: History, path: Path) -> None:
    """Write the history; a file of this name is replaced."""
    encoder = msgspec.json.Encoder()
    line = bytearray()
    with path.open("wb") as file:
        file.write(FORMAT.encode() + b"\n")
        for event in history.events:
            encoder.encode_into(event, line)
            line += b"\n"
            file.write(line)


def load_history(path: Path) -> History:
    """Read what `save_history` wrote. Raises InvalidDataError, which names the line that cannot be read."""
    events: list[Event] = []
    with path.open("rb") as file:
        if file.readline().strip() != FORMAT.encode():
            raise InvalidDataError(f"{path} is not a history: its first line is not {FORMAT}")
        for number, line in enumerate(file, 2):
            try:
                events.append(_decoder.decode(line))
            except UNDECODABLE as error:
                raise InvalidDataError(f"{path}, line {number}: {error}") from None
    return History(tuple(events))
