"""Producers that a program has not closed when it ends: what they have taken is still sent.

Their threads are daemons, and end with the interpreter. Records of `send` that wait for linger.ms, or that are on
their way, would be lost without a word.
"""

from __future__ import annotations

import atexit
import time
import weakref
from contextlib import ExitStack
from typing import Protocol

import spark_broker.native_calls  # noqa: F401 (It ends after this module: what is registered last is called first.)

END_S = 5.0
"""How long the end of the interpreter waits for all of them together."""


class Closable(Protocol):
    """A client that can be closed, again and again."""

    def close_left(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for what is under way. What is left fails, and a warning says so."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_at_end(client: Closable) -> None:
    """Close the client when the interpreter ends, unless nothing refers to it any more. It may be closed by then."""
    _open.add(client)


@atexit.register
def close_left() -> None:
    """Close what is open. The driver of a cluster calls this before it ends the brokers."""
    end_s = time.monotonic() + END_S
    with ExitStack() as stack:  # An error of one keeps no other from being closed.
        for client in list(_open):
            stack.callback(_close, client, end_s)


def _close(client: Closable, end_s: float) -> None:
    client.close_left(max(0.0, end_s - time.monotonic()))
