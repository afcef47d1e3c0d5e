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
from typing import TypeVar

from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.settings import Address
from spark_broker.config import ConsumerConfig
from spark_broker.transport.client import Connection
from spark_broker.transport.client_stream import ClientStream
from spark_broker.transport.origin import after_fork

K = TypeVar("K")
V = TypeVar("V")

CLUSTERS_MAX = 4
STREAMS_MAX = 16


class Kept:
    """Safe for use by many threads: what one of them uses, no other one finds here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metadata: OrderedDict[ConsumerConfig, ClusterMetadata] = OrderedDict()
        self._streams: OrderedDict[Address, ClientStream] = OrderedDict()

    @contextmanager
    def metadata(self, settings: ConsumerConfig, cluster_id: str) -> Iterator[ClusterMetadata]:
        """Metadata of the cluster with this id, perhaps what an earlier task has learned. It is not kept after an
        exception.

        Raises InvalidConfigError.
        """
        with self._lock:
            known = self._metadata.pop(settings, None)
        if known is not None and known.view.cluster_id != cluster_id:
            known.close()  # A cluster was made anew at the same addresses.
            known = None
        metadata = known or ClusterMetadata.connect(settings)
        left: ClusterMetadata | None = metadata
        try:
            yield metadata
            with self._lock:
                left = _put(self._metadata, settings, metadata, CLUSTERS_MAX)
        finally:
            if left is not None:
                left.close()

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
            left = _put(self._streams, address, stream, STREAMS_MAX)
        if left is not None:
            left.close()

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


def _put(kept: OrderedDict[K, V], key: K, value: V, most: int) -> V | None:
    """Keep it as the newest. Returns what is kept no longer."""
    left = kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        _, left = kept.popitem(last=False)
    return left


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
