"""A process of clients that never pause: `python -m tests.support.busy_clients <host:port> <topic> <clients>`.

Some append, some fetch, and some ask for metadata. One thread drives many of them, so that the brokers are busy.
Says "busy" when all have been answered once. After a line on stdin it prints, as JSON, how often each kind was
answered, and how often each error came.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable

import pyarrow as pa

from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.messages import (
    AppendRequest,
    FetchPartition,
    FetchRequest,
    MetadataRequest,
    MetadataResponse,
    PartitionMetadata,
)
from spark_broker.protocol.schema import DEFAULT_SCHEMA, conform
from spark_broker.transport.client import Connection
from spark_broker.transport.client_stream import ClientStream

CLIENTS_PER_THREAD = 25
APPENDS_AT_A_TIME = 16
TIMEOUT_MS = 60_000
FETCH_BYTES = 200_000
PAUSE_S = 0.5

Round = Callable[[], None]
"""Every client of a thread asks once more, and is answered."""


class BusyClients:
    """Clients of one topic. `answered` counts the answers of each kind, and the errors."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.answered: Counter[str] = Counter()
        self.rounds = threading.Semaphore(0)
        self._topic = topic
        host, _, port = bootstrap.partition(",")[0].rpartition(":")
        metadata = Connection(host, int(port)).call(MetadataRequest([topic]), timeout_ms=TIMEOUT_MS)
        assert isinstance(metadata, MetadataResponse)
        self._addresses = {broker.id: (broker.host, broker.port) for broker in metadata.brokers}
        (topic_metadata,) = metadata.topics
        self._topic_id, self._partitions = topic_metadata.topic_id, topic_metadata.partitions
        rows = pa.RecordBatch.from_arrays([pa.array([b"x" * 100] * 20, pa.binary())], names=["value"])
        self._batch = encode_batch(conform(rows, DEFAULT_SCHEMA))
        self._number = 0

    def start(self, clients: int) -> None:
        """Return when every thread has had its first round."""
        makers = [
            make
            for make in (self._appenders, self._fetchers)
            for _ in range(max(clients // 3 // CLIENTS_PER_THREAD, 1))
        ] + [self._caller] * (clients // 3 // CLIENTS_PER_THREAD * 5)
        for make in makers:
            threading.Thread(target=self._keep_busy, args=(make,), daemon=True).start()
        for _ in makers:
            self.rounds.acquire()

    def _keep_busy(self, make: Callable[[], Round]) -> None:
        first = True
        while True:
            try:
                go_round = make()
                while True:
                    go_round()
                    if first:
                        first = False
                        self.rounds.release()
            except SparkBrokerError as error:
                self.answered[type(error).__name__] += 1
                threading.Event().wait(PAUSE_S)

    def _appenders(self) -> Round:
        streams = self._streams("append")

        def go_round() -> None:
            for partition, _, stream in streams:
                for number in range(APPENDS_AT_A_TIME):
                    request = AppendRequest(
                        number, self._topic_id, partition.partition, partition.leader_epoch, -1, TIMEOUT_MS
                    )
                    stream.send(request, self._batch)
            for _, _, stream in streams:
                for _ in range(APPENDS_AT_A_TIME):
                    stream.receive(timeout_ms=TIMEOUT_MS)
            self.answered["appends"] += len(streams) * APPENDS_AT_A_TIME

        return go_round

    def _fetchers(self) -> Round:
        streams = self._streams("fetch")

        def go_round() -> None:
            for partition, _, stream in streams:
                wanted = FetchPartition(self._topic_id, partition.partition, partition.leader_epoch, 0, FETCH_BYTES)
                stream.send(FetchRequest(0, max_wait_ms=0, min_bytes=1, max_bytes=FETCH_BYTES, partitions=[wanted]))
            for _, _, stream in streams:
                stream.receive(timeout_ms=TIMEOUT_MS)
            self.answered["fetches"] += len(streams)

        return go_round

    def _caller(self) -> Round:
        self._number += 1
        connection = Connection(*self._addresses[self._number % len(self._addresses)])

        def go_round() -> None:
            connection.call(MetadataRequest(None), timeout_ms=TIMEOUT_MS)
            self.answered["calls"] += 1

        return go_round

    def _streams(self, kind: str) -> list[tuple[PartitionMetadata, Connection, ClientStream]]:
        """Streams to the partitions' leaders in turn, each on a connection of its own, as clients have."""
        opened = []
        for number in range(CLIENTS_PER_THREAD):
            partition = self._partitions[number % len(self._partitions)]
            connection = Connection(*self._addresses[partition.leader])
            opened.append((partition, connection, connection.open_stream(kind)))
        return opened


def main() -> None:
    """Send requests until there is a line on stdin."""
    os.nice(19)  # as on another machine: the brokers must run short of processor time, not the test
    busy = BusyClients(sys.argv[1], sys.argv[2])
    busy.start(int(sys.argv[3]))
    sys.stdout.write("busy\n")
    sys.stdout.flush()
    sys.stdin.readline()
    json.dump(busy.answered, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # a hundred threads are in the middle of something


if __name__ == "__main__":
    main()
