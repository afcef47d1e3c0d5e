"""The controller's end of a broker's session. A thread sends the messages: the controller never waits for a broker."""

from __future__ import annotations

import logging
import queue
import threading

from spark_broker.errors import NetworkError
from spark_broker.protocol.messages import Message
from spark_broker.threads import Fate, begin
from spark_broker.transport.server_stream import ServerStream

logger = logging.getLogger(__name__)

MAX_WAITING_MESSAGES = 10_000
"""At this number of messages the session is given up: a stopped broker, which takes none, must not fill the memory."""


class BrokerSession:
    """A stream and the thread that sends on it. A stopped broker blocks that thread, and nothing else."""

    def __init__(self, session_id: int, stream: ServerStream, on_bug: Fate) -> None:
        self.session_id = session_id
        self._stream = stream
        self._waiting: queue.Queue[Message | None] = queue.Queue(MAX_WAITING_MESSAGES)
        self._closed = threading.Event()
        self._given_up = False  # what waits is not sent, and nothing tells the thread that sends of the end
        self._sender = begin(f"session-{session_id}", on_bug, self._send_all)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def send(self, message: Message) -> None:
        """Send after everything that was sent before. Does nothing once the session is closed."""
        if not self.closed:
            self._put(message)

    def close(self, last: Message | None = None) -> None:
        """Send `last` and then nothing more."""
        if not self.closed:
            self._closed.set()
            if last is not None:
                self._put(last)
            self._put(None)

    def wait_sent(self, timeout_s: float) -> None:
        """After `close`: wait until everything was sent or the broker has left, at most `timeout_s`."""
        self._sender.join(timeout_s)

    def _put(self, message: Message | None) -> None:
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            logger.warning("session %d: the broker takes no messages; its session is given up", self.session_id)
            self._given_up = True
            self._closed.set()

    def _send_all(self) -> None:
        while not self._given_up and (message := self._waiting.get()) is not None:
            try:
                self._stream.send(message)
            except NetworkError:
                self._closed.set()
                return
