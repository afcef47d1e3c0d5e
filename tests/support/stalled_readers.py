"""A process of readers that ask and do not read: `python -m tests.support.stalled_readers <host:port> <topic> <count>`.

Says "asked" when all have asked. After a line on stdin it prints, as JSON, what each reader then finds:
"answers", or the error's type.
"""

from __future__ import annotations

import json
import sys

from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.messages import FetchPartition, FetchRequest, MetadataRequest, MetadataResponse
from spark_broker.transport.client import Connection
from spark_broker.transport.client_stream import ClientStream

MAX_BYTES = 50 << 20
FETCHES = 4
READ_TIMEOUT_MS = 20_000


def ask(connection: Connection, topic_id: str, leader_epoch: int) -> ClientStream:
    """A stream with fetches of everything on their way. The first answers may fit into what its process reads ahead."""
    stream = connection.open_stream("fetch")
    partition = FetchPartition(topic_id, 0, leader_epoch, 0, MAX_BYTES)
    for number in range(FETCHES):
        stream.send(FetchRequest(number, max_wait_ms=1000, min_bytes=1, max_bytes=MAX_BYTES, partitions=[partition]))
    return stream


def found(stream: ClientStream) -> str:
    try:
        for _ in range(FETCHES):
            stream.receive(timeout_ms=READ_TIMEOUT_MS)
    except SparkBrokerError as error:
        return type(error).__name__
    return "answers"


def main() -> None:
    """Ask, stall until there is a line on stdin, and look."""
    host, _, port = sys.argv[1].rpartition(":")
    connection = Connection(host, int(port))
    metadata = connection.call(MetadataRequest([sys.argv[2]]), timeout_ms=20_000)
    assert isinstance(metadata, MetadataResponse)
    (topic,) = metadata.topics
    streams = [ask(connection, topic.topic_id, topic.partitions[0].leader_epoch) for _ in range(int(sys.argv[3]))]
    sys.stdout.write("asked\n")
    sys.stdout.flush()
    sys.stdin.readline()
    json.dump([found(stream) for stream in streams], sys.stdout)


if __name__ == "__main__":
    main()
