"""What a broker says of its log directory: the replicas that it has open, and those that it has set aside."""

from __future__ import annotations

from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.protocol.messages import DescribeLogDirResponse, ReplicaSetAside, StoredReplica


def describe(manager: ReplicaManager) -> DescribeLogDirResponse:
    """Reads the directory. Raises KafkaStorageError, StorageRefusedError."""
    replicas = [StoredReplica(p.topic.name, p.key[1], p.log.size_bytes) for p in manager.partitions()]
    aside = [
        ReplicaSetAside(
            found.replica.topic, found.replica.partition, found.kind, str(found.replica.path), found.since_ms
        )
        for found in manager.directory.all_set_aside()
    ]
    return DescribeLogDirResponse(str(manager.directory.path), replicas, aside)
