"""Events that wait while a decision is being written, perhaps for as long as a metadata store fails.

Nothing is decided meanwhile, but live brokers stay live: their heartbeats are answered after a while.
"""

from __future__ import annotations

import itertools

from spark_broker.controller.controller import Controller
from spark_broker.controller.effects import Send
from spark_broker.controller.events import Event, HeartbeatReceived
from spark_broker.controller.image import MetadataImage

ANSWER_AFTER_MS = 500
"""Heartbeats are answered before the write ends if it takes longer than this. An ordinary write does not."""


class Meanwhile:
    """The events that wait, in the order in which they came.

    Of each session's answered heartbeats only the last one waits: it repeats what the earlier ones said.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._committed = controller.image
        self._began_ms = 0
        self._numbers = itertools.count()
        self._events: dict[tuple[str, int], Event] = {}

    def __len__(self) -> int:
        return len(self._events)

    def begin(self, committed: MetadataImage, now_ms: int) -> None:
        """A decision is being written from now on. `committed`: the image without it."""
        self._committed, self._began_ms = committed, now_ms

    def take(self, event: Event, now_ms: int) -> Send | None:
        """Let the event wait. Returns an interim answer to its sender, if any."""
        answer = None
        if isinstance(event, HeartbeatReceived) and now_ms - self._began_ms >= ANSWER_AFTER_MS:
            answer = self._controller.answer_meanwhile(event, self._committed)
        if answer is None or not isinstance(event, HeartbeatReceived):
            self._events["event", next(self._numbers)] = event
            return None
        key = ("answered", event.session_id)
        self._events.pop(key, None)
        self._events[key] = event
        return Send(event.session_id, answer)

    def release(self, limit: int) -> list[Event]:
        """Take out the first `limit` events."""
        return [self._events.pop(key) for key in list(itertools.islice(self._events, limit))]
