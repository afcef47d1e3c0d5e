"""How many replicas a topic gets that does not say."""

from __future__ import annotations

from dataclasses import replace

from spark_broker.config import ClusterSettings

REPLICAS_BY_DEFAULT = 3


def with_default_replication(settings: ClusterSettings, brokers: int, *, shared_executor: bool) -> ClusterSettings:
    """The settings with a number for `default.replication.factor`. Replicas on one executor are all lost with it."""
    if settings.cluster.default_replication_factor > 0:
        return settings
    factor = 1 if shared_executor else min(REPLICAS_BY_DEFAULT, brokers)
    return replace(settings, cluster=replace(settings.cluster, default_replication_factor=factor))
