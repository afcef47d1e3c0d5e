"""The append stream to one leader. A thread that has a batch writes it; one thread receives the answers.

A thread that finds another one writing leaves its batch to the sending thread of the channel. So no caller writes for
others. The receiving thread never writes. If it were blocked in a write while the broker is blocked in an answer,
neither would go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from spark_broker.client.leader_channel import LeaderChannel
from spark_broker.client.outgoing import OutgoingBatch
from spark_broker.errors import InvalidRequestError, NoThreadError, SparkBrokerError
from spark_broker.interrupts import Condition
from spark_broker.protocol.messages import AppendRequest, AppendResponse
from spark_broker.threads import begin
from spark_broker.transport.client import Connection
from spark_broker.transport.client_stream import ClientStream

DIRECT_WRITES = 4
"""A calling thread writes at most this many batches. The sending thread writes the rest."""


class ChannelOwner(Protocol):
    """What a channel asks of the sender."""

    lock: threading.Lock

    def next_append(self, channel: LeaderChannel) -> tuple[AppendRequest, OutgoingBatch] | None:
        """Take the next batch to write. None: nothing can be sent now."""

    def written(self, channel: LeaderChannel, batch: OutgoingBatch) -> None:
        """The transport has taken the batch."""

    def answered(self, channel: LeaderChannel, response: AppendResponse) -> None:
        """The leader has answered one append."""

    def broke(self, channel: LeaderChannel, error: SparkBrokerError) -> None:
        """The stream is broken. Batches that were in flight on it may be stored or not."""

    def died(self, error: BaseException) -> None:
        """A thread of the channel has ended by an error of our own."""


class AppendChannel:
    """The threads and the stream of one `LeaderChannel`, which the owner's lock guards."""

    def __init__(self, owner: ChannelOwner, leader: LeaderChannel, request_timeout_ms: int, name: str) -> None:
        """The caller holds the owner's lock. Both threads begin now: when the interpreter ends, Python 3.12 starts none
        any more, and what waits has to be sent then. Raises NoThreadError.
        """
        self._leader = leader
        self._owner = owner
        self._request_timeout_ms = request_timeout_ms
        self._name = name
        self._work = Condition(owner.lock)
        self._has_work = False
        self._write_lock = threading.Lock()
        self._connection = Connection(leader.address.host, leader.address.port)
        self._stream: ClientStream | None = None
        self._given_up = False
        try:
            self._start(self._send_loop, "send")
            self._start(self._receive_loop, "receive")
        except NoThreadError:
            self._given_up = True
            self.wake()
            raise

    def wake(self) -> None:
        """Let the sending thread write what there is. The caller holds the owner's lock."""
        self._has_work = True
        self._work.notify_all()

    def write_now(self) -> None:
        """Write what there is, in this thread, unless another thread is writing."""
        if self._write_lock.acquire(blocking=False):
            try:
                more = self._write(DIRECT_WRITES)
            finally:
                self._write_lock.release()
        else:
            more = True
        if more:
            with self._owner.lock:
                self.wake()

    def close(self) -> None:
        """Break the stream; the channel's threads end. The caller has marked it broken."""
        with self._owner.lock:
            self.wake()
        stream = self._stream
        if stream is not None:
            stream.close()

    def _write(self, limit: int | None) -> bool:
        """Write up to `limit` batches; returns whether the limit was reached."""
        written = 0
        try:
            while limit is None or written < limit:
                taken = self._owner.next_append(self._leader)
                if taken is None:
                    return False
                request, batch = taken
                message = batch.message
                self._open_stream().send(request, message.head, message.body, timeout_ms=self._request_timeout_ms)
                self._owner.written(self._leader, batch)
                written += 1
        except SparkBrokerError as error:
            self._owner.broke(self._leader, error)
            return False
        return True

    def _open_stream(self) -> ClientStream:
        if self._stream is None:
            stream = self._connection.open_stream("append")
            with self._owner.lock:
                self._stream = stream
                self._work.notify_all()
            if self._leader.broken:  # `close` may have come before there was a stream
                stream.close()
        return self._stream

    @property
    def _is_over(self) -> bool:
        return self._leader.broken or self._given_up

    def _send_loop(self) -> None:
        while True:
            with self._owner.lock:
                self._work.wait_for(lambda: self._has_work or self._is_over)
                self._has_work = False
                if self._is_over:
                    return
            with self._write_lock:
                self._write(None)

    def _receive_loop(self) -> None:
        with self._owner.lock:
            self._work.wait_for(lambda: self._stream is not None or self._is_over)
            stream = self._stream
        if stream is None:
            return
        try:
            while True:
                # The machine keeps the deadline of each append. It closes the stream when one passes.
                response, _ = stream.receive(timeout_ms=None)
                if not isinstance(response, AppendResponse):
                    raise InvalidRequestError(
                        f"{self._leader.address} answered an append with {type(response).__name__}"
                    )
                self._owner.answered(self._leader, response)
        except SparkBrokerError as error:
            self._owner.broke(self._leader, error)
        finally:
            stream.close()
            self._connection.close()

    def _start(self, target: Callable[[], None], what: str) -> None:
        begin(f"{self._name}-{what}-{self._leader.broker_id}", self._owner.died, target)
