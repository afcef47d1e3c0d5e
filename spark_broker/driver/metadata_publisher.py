"""Publishes committed metadata: each subscribed session gets a snapshot first, then every record once, in order.

It has no thread and no stream: the controller's process, or the simulated one, sends the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spark_broker.controller.image import MetadataImage
from spark_broker.controller.records import MetadataRecord
from spark_broker.driver.metadata_update import records_update, snapshot_update
from spark_broker.protocol.messages import Message


class MetadataPublisher:
    """The subscribed sessions, in the order of their subscription. One thread uses it."""

    def __init__(self, committed: Callable[[], MetadataImage], send: Callable[[int, Message], bool]) -> None:
        """`committed`: the image of all committed records. `send`: sends to a session; False: the session is over."""
        self._committed = committed
        self._send = send
        self._subscribed: dict[int, None] = {}

    def subscribe(self, session_id: int) -> None:
        """Send the session the whole image now, and every commit from here on."""
        if self._send(session_id, snapshot_update(self._committed())):
            self._subscribed[session_id] = None

    def unsubscribe(self, session_id: int) -> None:
        """The session is over."""
        self._subscribed.pop(session_id, None)

    def publish(self, first_offset: int, records: Sequence[MetadataRecord]) -> None:
        """These records were committed, the first at this offset, and the committed image has them."""
        if not self._subscribed:
            return
        update = records_update(self._committed(), first_offset, records)
        for session_id in list(self._subscribed):
            if not self._send(session_id, update):
                self.unsubscribe(session_id)
