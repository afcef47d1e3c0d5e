"""One decision at a time: its records are committed before anybody is told of it, and what comes meanwhile waits.

A shell writes the records that `decide` gives, and then carries out the effects that `committed` gives: the
controller's thread in production, events in simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from spark_broker.controller.controller import Controller
from spark_broker.controller.effects import Effect, Send
from spark_broker.controller.events import Event
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.meanwhile import Meanwhile
from spark_broker.controller.records import MetadataRecord
from spark_broker.errors import invariant

MAX_BATCH: Final = 1000
"""Events of one decision, which share one file of the metadata log."""


class Decisions:
    """Invariant: while a decision is being written (`is_writing`), the controller decides nothing."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._waiting = Meanwhile(controller)
        self._effects: list[Effect] = []
        self.is_writing = False

    def __len__(self) -> int:
        """How many events wait."""
        return len(self._waiting)

    def decide(self, events: Sequence[Event], committed: MetadataImage, now_ms: int) -> list[MetadataRecord]:
        """What is to be committed, in one file; nothing: go on with `committed`. `committed`: the image before it."""
        invariant(not self.is_writing, "a decision is made while another is being written")
        results = [self._controller.handle(event, now_ms) for event in events]
        self._effects = [effect for result in results for effect in result.effects]
        records = [record for result in results for record in result.records]
        if records:
            self.is_writing = True
            self._waiting.begin(committed, now_ms)
        return records

    def committed(self) -> list[Effect]:
        """The decision's records are committed, if it has any: what is to be done, in order."""
        self.is_writing = False
        effects, self._effects = self._effects, []
        return effects

    def let_wait(self, event: Event, now_ms: int) -> Send | None:
        """An event that comes while a decision is being written; returns what its sender is told meanwhile."""
        return self._waiting.take(event, now_ms)

    def next_events(self) -> list[Event]:
        """Those that have waited longest, up to MAX_BATCH. They wait no longer."""
        return self._waiting.release(MAX_BATCH)
