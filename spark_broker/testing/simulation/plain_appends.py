"""Appends without sequence numbers, with acks 0, 1 or all, each sent once: the load of clients without idempotence.

Only what is acknowledged with acks=all is promised; the outcome of the others is "failed" at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from spark_broker.client.cluster_view import ClusterView, address_of
from spark_broker.client.settings import Address
from spark_broker.errors import NetworkError, RequestTimedOutError, SparkBrokerError, error_from_code
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import ACKS_ALL, AppendRequest, AppendResponse
from spark_broker.testing.simulation.network import End
from spark_broker.testing.simulation.scheduler import Timer

if TYPE_CHECKING:
    from spark_broker.testing.simulation.client import Client

ACKS = (0, 1, 1, ACKS_ALL)
TIMEOUT_MS = 800


@dataclass(slots=True, eq=False)
class _Stream:
    """The stream to one leader. `awaited`: operations by correlation id."""

    end: End
    timer: Timer
    awaited: dict[int, int] = field(default_factory=dict)


class PlainAppends:
    """The plain appends of one client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._world = client.world
        self._streams: dict[Address, _Stream] = {}
        self._count = 0

    def append(self, view: ClusterView, topic_id: str, tp: TopicPartition, number: int, rows: int) -> bool:
        """Send a batch to the leader; False while none is known."""
        leader = view.leader(tp.topic, tp.partition)
        if leader is None:
            return False
        broker, state = leader
        self._count += 1
        operation = self._world.invoked(f"{self._client.name}/{self._count}", tp, number, rows)
        stream = self._stream(address_of(broker))
        acks = self._world.client_rng.choice(ACKS)
        if acks == ACKS_ALL:
            stream.awaited[self._count] = operation
        else:
            self._world.history.failed(operation, NetworkError(f"acks={acks} promises nothing"))
        request = AppendRequest(self._count, topic_id, tp.partition, state.leader_epoch, acks, TIMEOUT_MS)
        stream.end.send((request, bytes(self._world.payloads.encoded(number, rows))))
        stream.timer.set(TIMEOUT_MS * 1.5)
        return True

    def _stream(self, address: Address) -> _Stream:
        stream = self._streams.get(address)
        if stream is None:
            world = self._world
            end = world.network.open(self._client, address.host, address, "append")
            timer = Timer(world.scheduler, self._client, "appends timed out", lambda: self._timed_out(address, opened))
            stream = opened = self._streams[address] = _Stream(end, timer)
            end.on_message = lambda message: self._received(address, opened, message)
            end.on_break = lambda error: self._broke(address, opened, error)
        return stream

    def _received(self, address: Address, stream: _Stream, message: object) -> None:
        if isinstance(message, SparkBrokerError):
            stream.end.close()
            self._broke(address, stream, message)
            return
        response, _ = cast("tuple[AppendResponse, bytes]", message)
        operation = stream.awaited.pop(response.correlation_id, None)
        if response.error_code:
            self._client.want_metadata()
        if operation is None:
            return
        if response.error_code:
            self._world.history.failed(operation, error_from_code(response.error_code, response.error_message))
        else:
            self._world.append_acknowledged(operation, response.base_offset)

    def _timed_out(self, address: Address, stream: _Stream) -> None:
        if stream.awaited:
            stream.end.close()
            self._broke(address, stream, RequestTimedOutError("the leader did not answer an append in time"))

    def _broke(self, address: Address, stream: _Stream, error: SparkBrokerError) -> None:
        if self._streams.get(address) is stream:
            del self._streams[address]
        for operation in stream.awaited.values():
            self._world.history.failed(operation, error)
        stream.awaited.clear()
        self._client.want_metadata()
