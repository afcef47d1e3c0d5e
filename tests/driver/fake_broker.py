"""A broker that is only a session: it registers over a real stream, sends heartbeats and replays metadata."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Self

from spark_broker.controller.image import EMPTY_IMAGE, MetadataImage, PartitionRegistration
from spark_broker.controller.records import decode_records
from spark_broker.controller.snapshot import image_from_snapshot
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.messages import (
    PROTOCOL_VERSION,
    HeartbeatRequest,
    HeartbeatResponse,
    MetadataUpdate,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    StopBroker,
)
from spark_broker.transport.client import Connection
from spark_broker.transport.client_stream import ClientStream

WAIT_S = 20.0
HEARTBEAT_S = 0.02


class FakeBroker:
    """Keeps every message that it received. Its port is really open until `die`."""

    def __init__(self, at_host: str, at_port: int, launch: int, directory: str, **changes: object) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        values: dict[str, object] = {
            "version": PROTOCOL_VERSION,
            "cluster_id": "",
            "launch": launch,
            "broker_id": -1,
            "directory_id": directory,
            "incarnation": uuid.uuid4().hex,
            "start_kind": "clean",
            "host": "127.0.0.1",
            "port": self._listener.getsockname()[1],
            "rack": None,
            "machine": "m",
            "executor_id": f"e{launch}",
            "executor_pid": 1,
            "pid": 1,
            "pid_start_time": 1,
        }
        self.request = RegisterBrokerRequest(**{**values, **changes})  # type: ignore[arg-type]
        self.changed = threading.Condition()
        self.registered: RegisterBrokerResponse | None = None
        self.image: MetadataImage = EMPTY_IMAGE
        self.answers: list[HeartbeatResponse] = []
        self.stops: list[StopBroker] = []
        self.error: SparkBrokerError | None = None
        self.wants_shutdown = False
        self.skew_ms = 0  # how far its wall clock is ahead
        self._ahead_max_ms: int | None = None
        self.updates: list[MetadataUpdate] = []
        self._ended = threading.Event()
        self._connection = Connection(at_host, at_port)
        self._stream: ClientStream = self._connection.open_stream("session")
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._listen, self._beat)]
        self._stream.send(self.request)
        for thread in self._threads:
            thread.start()

    def _listen(self) -> None:
        try:
            while not self._ended.is_set():
                message, _ = self._stream.receive(timeout_ms=None)
                with self.changed:
                    self._take(message)
                    self.changed.notify_all()
        except SparkBrokerError as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()
        finally:
            self._ended.set()

    def _take(self, message: object) -> None:
        match message:
            case RegisterBrokerResponse():
                self.registered = message
                self._ahead_max_ms = self.wall_ms - message.wall_ms
            case MetadataUpdate():
                records = decode_records(message.records)
                self.updates.append(message)
                if message.snapshot:
                    self.image = image_from_snapshot(records, message.next_offset)
                else:
                    assert message.first_offset == self.image.next_offset
                    self.image = self.image.apply(records)
            case HeartbeatResponse():
                self.answers.append(message)
                self._ahead_max_ms = self.wall_ms - message.wall_ms
            case StopBroker():
                self.stops.append(message)
                self.wants_shutdown = True

    @property
    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.skew_ms

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            with self.changed:
                if self.registered is None:
                    continue
                beat = HeartbeatRequest(
                    self.registered.broker_epoch,
                    self.image.next_offset,
                    int(time.monotonic() * 1000),
                    ready=self.image.next_offset > self.registered.broker_epoch,
                    wants_shutdown=self.wants_shutdown,
                    wall_ms=self.wall_ms,
                    ahead_max_ms=self._ahead_max_ms,
                )
            try:
                self._stream.send(beat)
            except SparkBrokerError:
                return

    def wait(self, condition: Callable[[Self], object], what: str) -> Self:
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), WAIT_S), f"waited in vain: {what}; error {self.error}"
        return self

    def wait_live(self) -> Self:
        return self.wait(lambda b: b.answers and not b.answers[-1].fenced, "the broker is live")

    def partition(self, topic: str = "t", number: int = 0) -> PartitionRegistration | None:
        state = self.image.topic(topic)
        return None if state is None or number >= len(state.partitions) else state.partitions[number]

    @property
    def id(self) -> int:
        assert self.registered is not None
        return self.registered.broker_id

    def close_port(self) -> None:
        self._listener.close()

    def end_stream(self) -> None:
        """The stream ends, but the port stays open."""
        self._ended.set()
        self._stream.close()

    def die(self) -> None:
        """Port and stream are gone, as after SIGKILL."""
        self.close_port()
        self.end_stream()
