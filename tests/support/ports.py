"""Ports at which nobody listens."""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def refused_address() -> str:
    """An address without a listener."""
    return f"{HOST}:{free_port()}"
