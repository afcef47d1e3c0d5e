"""Ports at which nobody listens."""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


_held: list[socket.socket] = []
"""They are bound, and never listen: nobody else gets these ports while this process lives."""


def refused_address() -> str:
    """An address without a listener. A port that was only free a moment ago may be another worker's by now."""
    holder = socket.socket()
    holder.bind((HOST, 0))
    _held.append(holder)
    return f"{HOST}:{holder.getsockname()[1]}"
