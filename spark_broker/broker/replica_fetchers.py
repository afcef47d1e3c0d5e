"""The fetchers of a broker: one for each broker that leads a partition which this one follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from spark_broker.broker.fetch_session import FetcherSettings
from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.broker.replica_fetcher import Fetcher
from spark_broker.config import ClusterConfig
from spark_broker.controller.image import BrokerState, MetadataImage
from spark_broker.errors import ProcessLimitError
from spark_broker.process_limits import limit_reached

NewFetcher = Callable[[str, int, FetcherSettings, Callable[[BaseException], None]], Fetcher]
"""Makes the fetcher that pulls from the broker at this host and port."""


class ReplicaFetchers:
    """Not thread-safe: the replica manager calls it under its lock."""

    def __init__(self, config: ClusterConfig, new_fetcher: NewFetcher, on_bug: Callable[[BaseException], None]) -> None:
        self._config = config
        self._new_fetcher = new_fetcher
        self._on_bug = on_bug
        self._fetchers: dict[int, Fetcher] = {}

    def follow(
        self,
        broker_id: int,
        broker_epoch: int,
        image: MetadataImage,
        partitions: Iterable[tuple[PartitionKey, Partition]],
    ) -> ProcessLimitError | None:
        """Follow the leaders that these partitions have now, as this broker with this epoch.

        Where the process can have no thread for one of them, this returns the error, and is to be called again later.
        """
        wanted: dict[int, dict[PartitionKey, Partition]] = {}
        for key, partition in partitions:
            leader = partition.replica.assignment.leader
            if leader not in (-1, broker_id) and leader in image.brokers:
                wanted.setdefault(leader, {})[key] = partition
        for leader in set(self._fetchers) - set(wanted):
            self._fetchers.pop(leader).stop()
        settings = self._settings(broker_id, broker_epoch)
        refused: ProcessLimitError | None = None
        for leader, followed in wanted.items():
            versions = {key: partition.replica.assignment.leader_epoch for key, partition in followed.items()}
            try:
                self._fetcher(image.brokers[leader], settings).follow(followed, versions)
            except (RuntimeError, MemoryError) as error:
                refused = limit_reached(error)
                if refused is None:
                    raise
        return refused

    def stop(self) -> None:
        for fetcher in self._fetchers.values():
            fetcher.stop()

    def _fetcher(self, leader: BrokerState, settings: FetcherSettings) -> Fetcher:
        fetcher = self._fetchers.get(leader.id)
        if fetcher and fetcher.address == (leader.host, leader.port) and fetcher.settings == settings:
            return fetcher
        if fetcher:
            self._fetchers.pop(leader.id).stop()
        fetcher = self._new_fetcher(leader.host, leader.port, settings, self._on_bug)
        fetcher.start()
        self._fetchers[leader.id] = fetcher  # Afterwards: one that could not start does nothing, for ever.
        return fetcher

    def _settings(self, broker_id: int, broker_epoch: int) -> FetcherSettings:
        config = self._config
        return FetcherSettings(
            broker_id=broker_id,
            broker_epoch=broker_epoch,
            max_wait_ms=config.replica_fetch_wait_max_ms,
            max_bytes=config.replica_fetch_response_max_bytes,
            request_timeout_ms=config.replica_fetch_wait_max_ms + 5_000,
        )
