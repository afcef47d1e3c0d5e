"""Ports: whether one refuses connections (its process is gone then, without a doubt), and what to do without one."""

from __future__ import annotations

import socket

CONNECT_TIMEOUT_S = 0.2

PORTS_HINT = (
    "driver.ports needs two ports that are free on the driver's machine, and broker.host, if it is set, must be an "
    "address of that machine."
)


def port_refuses(host: str, port: int, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
    """True only for a refusal. A port that answers, and a machine that cannot be reached, may have a live broker."""
    try:
        with socket.create_connection((host, port), timeout_s):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, UnicodeError):  # UnicodeError: a host that is no name at all
        return False
