"""When a sender has to look at what it has sent. It sleeps until then: a producer without appends costs nothing.

No threads and no clock: the sender's lock covers what is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from spark_broker.client.append_channel import AppendChannel
from spark_broker.client.partition_queue import PartitionQueue

STALLED_S = 0.5
"""An append that waits for longer than this makes the sender look whether its leader still leads."""

LOOK_AGAIN_S = 0.1
"""What is due already, and is being seen to, is looked at again after this long."""


class AppendDeadlines:
    """Of answers: `timeout_s` is how long a leader may take for one."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def first_s(self, sent_at_s: float) -> float:
        """When an append that was sent then is first looked at."""
        return sent_at_s + min(STALLED_S, self._timeout_s)

    def stalled(self, channels: Collection[AppendChannel], now_s: float) -> bool:
        return any(_age_s(channel, now_s) > STALLED_S for channel in channels)

    def overdue(self, channels: Collection[AppendChannel], now_s: float) -> list[AppendChannel]:
        return [channel for channel in channels if _age_s(channel, now_s) > self._timeout_s]

    def next_s(
        self, queues: Collection[PartitionQueue], channels: Collection[AppendChannel], refresh_s: float, now_s: float
    ) -> float:
        """The earliest of a batch's, of a leader's answer's, and of the metadata's, `refresh_s`; infinite: none is."""
        batches = [queue.unacked[0].deadline_s for queue in queues if queue.unacked]
        ages = [_age_s(channel, now_s) for channel in channels if channel.in_flight]
        answers = [now_s + limit - age for age in ages for limit in (STALLED_S, self._timeout_s) if age <= limit]
        earliest_s = min([*batches, *answers, refresh_s if channels else math.inf])
        return max(earliest_s, now_s + LOOK_AGAIN_S)


def _age_s(channel: AppendChannel, now_s: float) -> float:
    """Of the oldest append that the leader owes an answer to."""
    entry = next(iter(channel.in_flight.values()), None)
    return 0.0 if entry is None else now_s - entry.sent_at_s
