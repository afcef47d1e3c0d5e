"""Looks after a server's streams: wakes those whose client has left, and disconnects clients that take nothing.

One thread serves all streams, so a stream that waits costs nothing. gRPC reports neither case by itself.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import stat
import struct
import threading
from pathlib import Path
from typing import Protocol

from spark_broker.threads import BeginAgain, Worker

logger = logging.getLogger(__name__)

LOOK_S = 0.5

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with 0 s: the kernel discards bytes that wait for the peer. The end would wait behind them otherwise."""


class Watched(Protocol):
    """What the watch needs of a stream. `peer`: its client's address, as gRPC writes it."""

    peer: str
    kind: str

    @property
    def sending_for_s(self) -> float:
        """How long the message that is being sent has waited for the client to take it; 0: none is being sent."""

    def look(self) -> None:
        """Wake the handler that waits on this stream, if its client has left."""


class StreamWatch(Worker):
    """Looks twice a second, while there are streams. `send_timeout_s`: how long a client may take nothing."""

    def __init__(self, send_timeout_s: float) -> None:
        super().__init__("stream-watch", BeginAgain())
        self.port = 0  # the server's port, by which its connections are recognised
        self._send_timeout_s = send_timeout_s
        self._streams: set[Watched] = set()
        self._changed = threading.Condition()
        self._pause = threading.Event()

    def add(self, stream: Watched) -> None:
        """Look after a stream from now on."""
        with self._changed:
            self._streams.add(stream)
            if len(self._streams) == 1:
                self._changed.notify()

    def remove(self, stream: Watched) -> None:
        """The stream has ended."""
        with self._changed:
            self._streams.discard(stream)

    def work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._streams))
            self._look()
            self._pause.wait(LOOK_S)

    def _look(self) -> None:
        """A function of its own: a local variable of the loop above would keep streams that have ended."""
        with self._changed:
            streams = list(self._streams)
        slow = {}
        for stream in streams:
            stream.look()
            if stream.sending_for_s > self._send_timeout_s:
                slow[stream.peer] = stream
        for peer, stream in slow.items():
            waited = f"{stream.sending_for_s:.0f} s"
            logger.warning("%s has taken nothing of its %s stream for %s: disconnected", peer, stream.kind, waited)
            disconnect(self.port, peer)


def disconnect(port: int, peer: str) -> bool:
    """Shut down the connection from `peer` to this process's `port`. Returns whether there was one.

    gRPC has no call for it. To gRPC it is as if the client's machine had gone: every stream of that connection breaks.
    """
    for entry in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is not connected
            if _shut_down(int(entry.name), port, peer):
                return True
    return False


def _shut_down(descriptor: int, port: int, peer: str) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
            return False
        is_peer = _same(connection.getpeername(), peer)
        if is_peer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.shutdown(socket.SHUT_RDWR)
        return is_peer


def _same(address: tuple[str, int], peer: str) -> bool:
    """`peer` is `ipv4:127.0.0.1:4711` or `ipv6:[::1]:4711`, perhaps percent-encoded."""
    host, _, port = peer.partition(":")[2].rpartition(":")
    if not port.isdigit() or int(port) != address[1]:
        return False
    return _plain(host.replace("%5B", "[").replace("%5D", "]").strip("[]")) == _plain(address[0])


def _plain(host: str) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
