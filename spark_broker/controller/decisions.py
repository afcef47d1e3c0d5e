"""One decision at a time: its records are committed before its effects are carried out, and other events wait.

A shell writes the records that `decide` returns, and then carries out the effects that `committed` returns. Some
decisions have no records, and still wait for the metadata log: it has to show that no other controller has taken over.
The shell is the controller's thread in production, and events in simulation.
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
"""Most events of one decision. Their records share one file of the metadata log."""


class Decisions:
    """Invariant: while a decision waits for the metadata log (`is_writing`), the controller decides nothing."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._waiting = Meanwhile(controller)
        self._effects: list[Effect] = []
        self.is_writing = False

    def __len__(self) -> int:
        """How many events wait."""
        return len(self._waiting)

    def decide(self, events: Sequence[Event], committed: MetadataImage, now_ms: int) -> list[MetadataRecord]:
        """The records to commit, in one file. Without records, the shell checks that the metadata log is still ours, if
        `is_writing`; else it calls `self.committed` at once.

        The parameter `committed` is the image before the decision.
        """
        invariant(not self.is_writing, "a decision is made while another is being written")
        results = [self._controller.handle(event, now_ms) for event in events]
        self._effects = [effect for result in results for effect in result.effects]
        records = [record for result in results for record in result.records]
        if records or any(result.certain for result in results):
            self.is_writing = True
            self._waiting.begin(committed, now_ms)
        return records

    def committed(self) -> list[Effect]:
        """The decision is committed, or the log was checked. Returns its effects, in order."""
        self.is_writing = False
        effects, self._effects = self._effects, []
        return effects

    def let_wait(self, event: Event, now_ms: int) -> Send | None:
        """Let an event wait while a decision is being written. Returns an interim answer to its sender, if any."""
        return self._waiting.take(event, now_ms)

    def next_events(self) -> list[Event]:
        """Take out the events that have waited longest, up to MAX_BATCH."""
        return self._waiting.release(MAX_BATCH)
