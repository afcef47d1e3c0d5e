"""Ports that a process may listen on, as `broker.ports` and `driver.ports` name them."""

from __future__ import annotations

import re

ANY_PORT = 0
PORT_MAX = 65535
_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def ports_of(text: str) -> range | None:
    """The ports of `9092` or `9092-9099`; of an empty text any port (`ANY_PORT`). None: it is no such text."""
    if not text:
        return range(ANY_PORT, ANY_PORT + 1)
    match = _PORTS.fullmatch(text)
    if match is None:
        return None
    first, last = int(match[1]), int(match[2] or match[1])
    return range(first, last + 1) if 0 < first <= last <= PORT_MAX else None


def ports_to_try(text: str, first: int = ANY_PORT) -> list[int]:
    """The ports of a setting, in the order in which to try them: `first` if it is one of them, then the others."""
    allowed = ports_of(text) or range(0)
    remembered = [first] if first != ANY_PORT and (first in allowed or ANY_PORT in allowed) else []
    return remembered + [port for port in allowed if port not in remembered]
