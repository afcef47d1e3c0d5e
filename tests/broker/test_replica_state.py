"""The state that a replica is rebuilt with comes in pieces: a partition may have many producers, and a message ends."""

from __future__ import annotations

import msgspec
import pytest

from spark_broker.broker import replica_state
from spark_broker.broker.append import Append
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.replica_log import from_wire
from spark_broker.broker.replica_state import PRODUCERS_AT_ONCE, AwaitedState, piece_of
from spark_broker.config import INT64_MAX
from spark_broker.core.replica import FetchPosition
from spark_broker.errors import OffsetNotAvailableError
from spark_broker.protocol import wire
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.messages import ProducerStateEntry, ReplicaStateRequest, ReplicaStateResponse
from tests.broker.lone_partition import BIG
from tests.broker.rig import TOPIC_ID, Outcome, batch
from tests.broker.test_fetch_session import LIVE, Open, Stream, opened

__all__ = ["opened"]


def state_of(ids: list[int], log_start_offset: int = 5) -> ReplicaStateResponse:
    entries = [ProducerStateEntry(id_, 0, 1, [(0, 0, id_, id_)]) for id_ in ids]
    return ReplicaStateResponse(log_start_offset, [(1, 0)], entries, 3)


def pieces_of(state: ReplicaStateResponse) -> list[ReplicaStateResponse]:
    """What a follower is answered until it has all."""
    awaited, pieces = AwaitedState(TOPIC_ID, 0, 1), list[ReplicaStateResponse]()
    whole: ReplicaStateResponse | None = None
    while whole is None:
        pieces.append(piece_of(state, awaited.request))
        whole = awaited.take(pieces[-1])
    by_id = sorted(state.producers, key=lambda producer: producer.producer_id)
    assert msgspec.structs.replace(whole, producers=by_id) == msgspec.structs.replace(state, producers=by_id)
    assert sorted(producer.producer_id for producer in whole.producers) == [p.producer_id for p in by_id]
    return pieces


@pytest.mark.parametrize("ids", [[], [0], [9, 4, 7], [5, 1, 3, 2], [0, 8, 3, 6, 1, 7, 2]])
def test_the_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> None:
    monkeypatch.setattr(replica_state, "PRODUCERS_AT_ONCE", 3)
    pieces = pieces_of(state_of(ids))
    assert len(pieces) == max(1, -(-len(ids) // 3))


def test_a_piece_fits_into_a_message() -> None:
    """Story: 64 MiB of producers were sent in one message, which the follower refused once a second, for ever."""
    largest = ProducerStateEntry(INT64_MAX, INT64_MAX, INT64_MAX, [(INT64_MAX,) * 4] * 5, INT64_MAX)
    piece = ReplicaStateResponse(INT64_MAX, [(INT64_MAX, INT64_MAX)] * 1000, [largest] * 1000, INT64_MAX)
    assert len(wire.encode(piece)) * (PRODUCERS_AT_ONCE // 1000) < wire.MAX_MESSAGE_BYTES


def test_a_follower_of_an_earlier_version_gets_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_state, "PRODUCERS_AT_ONCE", 3)
    state = state_of([4, 3, 2, 1])
    assert piece_of(state, ReplicaStateRequest(TOPIC_ID, 0, 1)) is state


def test_pieces_of_two_log_starts_are_not_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_state, "PRODUCERS_AT_ONCE", 3)
    awaited = AwaitedState(TOPIC_ID, 0, 1)
    assert awaited.take(piece_of(state_of([1, 2, 3, 4]), awaited.request)) is None
    with pytest.raises(OffsetNotAvailableError, match="has moved"):
        awaited.take(piece_of(state_of([1, 2, 3, 4], log_start_offset=6), awaited.request))


def test_a_replica_is_rebuilt_with_all_producers(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_state, "PRODUCERS_AT_ONCE", 3)
    leader, follower = opened(0), opened(1)
    for producer_id in range(8):
        message = encode_batch(batch(b"x" * BIG), producer_id=producer_id, producer_epoch=0, base_sequence=0)
        leader.append(Append(message, 0, 1, 0, SYSTEM_CLOCK.boottime_ms() + 30_000), Outcome())
    leader.follower_fetch(2, 1, FetchPosition(0, 8, 0), LIVE)
    leader.advance_log_start(6)
    state = leader.replica_state(0)
    assert (state.log_start_offset, len(state.producers)) == (6, 6)
    stream = Stream(leader, follower)
    stream.take(stream.ask())
    asked = 0
    while isinstance(request := stream.session.next_request(), ReplicaStateRequest):
        asked += 1
        stream.session.state_received(piece_of(leader.replica_state(0), request))
    assert asked == 2
    assert follower.replica.log_start_offset == 6
    assert follower.replica.producers == from_wire(state.producers)
    stream.take(stream.answer(request))
    assert follower.replica.log_end_offset == 8
