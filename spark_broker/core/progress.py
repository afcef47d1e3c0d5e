"""What a leader knows of one follower."""

from __future__ import annotations

from dataclasses import dataclass

from spark_broker.errors import invariant

UNKNOWN_OFFSET = -1


@dataclass(slots=True)
class FollowerProgress:
    """Updated by the follower's fetches; reset when the leader epoch or the follower's broker epoch changes.

    Invariant: `log_end_offset` is -1 (no fetch yet in this leader epoch) or at most the leader's log end offset.
    """

    broker_epoch: int
    last_caught_up_ms: int
    log_end_offset: int = UNKNOWN_OFFSET
    last_fetch_ms: int = -1
    leader_end_at_last_fetch: int = -1
    no_room: bool = False  # The follower's disk has no room for the batches after its log end.

    def fetched(self, fetch_offset: int, leader_end_offset: int, now_ms: int, *, no_room: bool = False) -> None:
        """The follower has everything below `fetch_offset`.

        It counts as caught up at the time of its previous fetch when it now has what the leader had then. So a
        steady stream of appends does not make a healthy follower look slow.
        """
        invariant(0 <= fetch_offset <= leader_end_offset, "a fetch at %d of %d", fetch_offset, leader_end_offset)
        if fetch_offset >= leader_end_offset:
            self.last_caught_up_ms = now_ms
        elif self.last_fetch_ms >= 0 and fetch_offset >= self.leader_end_at_last_fetch:
            self.last_caught_up_ms = max(self.last_caught_up_ms, self.last_fetch_ms)
        self.log_end_offset = fetch_offset
        self.last_fetch_ms = now_ms
        self.leader_end_at_last_fetch = leader_end_offset
        self.no_room = no_room and fetch_offset < leader_end_offset

    def lacks(self, high_watermark: int) -> bool:
        """Whether the follower itself reports that it lacks committed records.

        A member of the ISR that was rebuilt (a damaged log, KAFKA-7897) is not electable before it has caught up.
        """
        return UNKNOWN_OFFSET < self.log_end_offset < high_watermark

    def describe(self, leader_end_offset: int, now_ms: int) -> str:
        """How far the follower is. The text is for the log."""
        since = f"was caught up {now_ms - self.last_caught_up_ms} ms ago"
        if self.log_end_offset == UNKNOWN_OFFSET:
            return f"has not fetched in this leader epoch and {since}"
        return f"ends at {self.log_end_offset}, the leader at {leader_end_offset}, and {since}"

    def is_lagging(self, leader_end_offset: int, now_ms: int, lag_max_ms: int) -> bool:
        """A follower without room counts as lagging at once. To wait for it would only delay acknowledgements."""
        too_long = now_ms - self.last_caught_up_ms > lag_max_ms
        return self.log_end_offset != leader_end_offset and (too_long or self.no_room)
