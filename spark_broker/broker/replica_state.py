"""What a follower's log begins with that begins at its leader's log start: where that is, epochs, and producers.

A partition may have millions of producers, and a message holds 64 MiB. So the producers come in pieces, in the order of
their ids.
"""

from __future__ import annotations

import msgspec

from spark_broker.errors import OffsetNotAvailableError
from spark_broker.protocol.messages import ProducerStateEntry, ReplicaStateRequest, ReplicaStateResponse

PRODUCERS_AT_ONCE = 250_000
"""Each takes 50 to 250 bytes of a message. The leader reads all of them for each piece."""


def piece_of(state: ReplicaStateResponse, request: ReplicaStateRequest) -> ReplicaStateResponse:
    """What a leader answers at once. A follower of an earlier version has no limit, and gets all."""
    limit = min(request.producers_max, PRODUCERS_AT_ONCE)
    if limit <= 0 or (request.after_producer_id < 0 and len(state.producers) <= limit):
        return state
    left = [producer for producer in state.producers if producer.producer_id > request.after_producer_id]
    left.sort(key=lambda producer: producer.producer_id)
    return msgspec.structs.replace(state, producers=left[:limit], has_more=len(left) > limit)


class AwaitedState:
    """The follower's side: asks for one piece after the other."""

    def __init__(self, topic_id: str, partition: int, leader_epoch: int) -> None:
        self.request = ReplicaStateRequest(topic_id, partition, leader_epoch, producers_max=PRODUCERS_AT_ONCE)
        self._begun: ReplicaStateResponse | None = None
        self._producers: list[ProducerStateEntry] = []

    def take(self, piece: ReplicaStateResponse) -> ReplicaStateResponse | None:
        """The whole state; None: `request` asks for the next piece.

        Raises OffsetNotAvailableError when the pieces do not belong together: the leader's log start has moved.
        """
        begun = self._begun = self._begun or piece
        same = msgspec.structs.replace(begun, producers=piece.producers, has_more=piece.has_more) == piece
        if not same or (piece.has_more and not piece.producers):
            raise OffsetNotAvailableError("the leader's log start has moved while its producers were read")
        self._producers += piece.producers
        if piece.has_more:
            last = piece.producers[-1].producer_id
            self.request = msgspec.structs.replace(self.request, after_producer_id=last)
            return None
        return msgspec.structs.replace(piece, producers=self._producers)
