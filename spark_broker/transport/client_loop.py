"""The one thread that receives for all clients of a process. Their first connection begins it."""

from __future__ import annotations

import threading
import weakref

from spark_broker.errors import NetworkError
from spark_broker.threads import client_ended
from spark_broker.transport.channel import Channel
from spark_broker.transport.io_loop import IoLoop
from spark_broker.transport.origin import after_fork


class ClientLoop:
    """Begins the thread, and begins it again in a forked child, or after an error of ours ended it."""

    def __init__(self) -> None:
        self._new()
        after_fork(self._forked)

    def _new(self) -> None:
        self._lock = threading.Lock()
        self._loop: IoLoop | None = None
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()

    def get(self) -> IoLoop:
        """The running loop. Raises NoThreadError, and NetworkError if the process has no descriptors left."""
        with self._lock:
            if self._loop is None:
                try:
                    loop = IoLoop("client-io", self._ended)
                except OSError as error:
                    raise NetworkError(f"no connection can be opened: {error.strerror}") from None
                loop.begin()
                self._loop = loop
            return self._loop

    def add(self, channel: Channel) -> None:
        """A connection that is closed if the loop ends."""
        with self._lock:
            self._channels.add(channel)

    def _ended(self, error: BaseException) -> None:
        """By an error of ours. Nobody receives for these connections any more."""
        with self._lock:
            self._loop = None
            channels = list(self._channels)
        why = client_ended(error).message
        for channel in channels:
            channel.orphaned(why)

    def _forked(self) -> None:
        """The parent goes on with its connections: the child closes its own descriptors of them, and says nothing."""
        loop, channels = self._loop, list(self._channels)
        for channel in channels:
            channel.abandon()
        if loop is not None:
            loop.abandon()
        self._new()


client_loop = ClientLoop()
"""Of this process."""
