"""What a worker process of Spark keeps for its next task: metadata of clusters, and streams to leaders.

Spark gives a worker process one task after the other. To connect anew costs a small task as much as its rows do. A kept
stream has no request under way, and is looked at before it is used: its leader may have ended it.
"""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.settings import Address
from spark_broker.config import ConsumerConfig
from spark_broker.transport.client import Connection
from spark_broker.transport.client_stream import ClientStream
from spark_broker.transport.origin import after_fork

CLUSTERS_MAX = 4
STREAMS_MAX = 16


class Kept:
    """Safe for use by many threads: what one of them uses, no other one finds here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metadata: OrderedDict[ConsumerConfig, ClusterMetadata] = OrderedDict()
        self._streams: OrderedDict[Address, ClientStream] = OrderedDict()

    @contextmanager
    def metadata(self, settings: ConsumerConfig) -> Iterator[ClusterMetadata]:
        """Metadata of the cluster, perhaps what an earlier task has learned. It is not kept after an exception.

        Raises InvalidConfigError.
        """
        with self._lock:
            known = self._metadata.pop(settings, None)
        metadata = known or ClusterMetadata.connect(settings)
        left: ClusterMetadata | None = metadata
        try:
            yield metadata
            left = self._kept_instead_of(settings, metadata)
        finally:
            if left is not None:
                left.close()

    def _kept_instead_of(self, settings: ConsumerConfig, metadata: ClusterMetadata) -> ClusterMetadata | None:
        """Keep it. Returns what is kept no longer."""
        with self._lock:
            replaced = self._metadata.pop(settings, None)
            self._metadata[settings] = metadata
            if len(self._metadata) > CLUSTERS_MAX:
                _, replaced = self._metadata.popitem(last=False)
            return replaced

    def stream(self, address: Address) -> ClientStream:
        """A stream of fetches to this broker. Raises NetworkError."""
        with self._lock:
            stream = self._streams.pop(address, None)
        if stream is not None:
            if stream.is_quiet:
                return stream
            stream.close()
        return Connection(address.host, address.port).open_stream("fetch")

    def keep(self, address: Address, stream: ClientStream) -> None:
        """Keep a stream on which no answer is due."""
        with self._lock:
            replaced = self._streams.pop(address, None)
            self._streams[address] = stream
            if len(self._streams) > STREAMS_MAX:
                _, replaced = self._streams.popitem(last=False)
        if replaced is not None:
            replaced.close()

    def close(self) -> None:
        """Close everything that is kept."""
        with self._lock:
            clusters, streams = list(self._metadata.values()), list(self._streams.values())
            self._metadata.clear()
            self._streams.clear()
        for metadata in clusters:
            metadata.close()
        for stream in streams:
            stream.close()


KEPT = Kept()
"""This process's."""


@cache
def spare_collections() -> None:
    """Spark has garbage collected after each task. What the process has imported is looked at each time, for 35 ms;
    from now on it is not."""
    gc.freeze()


def _forked() -> None:
    """What the parent keeps is not this process's."""
    global KEPT  # noqa: PLW0603
    KEPT = Kept()


after_fork(_forked)
