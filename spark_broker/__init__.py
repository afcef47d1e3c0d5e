"""spark-broker: a replicated, partitioned, append-only log whose brokers are Spark executors.

Names are loaded on first use: `import spark_broker` loads neither Spark nor Arrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from spark_broker.errors import MissingDependencyError, SparkBrokerError
from spark_broker.group_model import (
    GroupDescription,
    GroupListing,
    GroupOffset,
    GroupRebalance,
    MemberDescription,
)
from spark_broker.model import (
    BrokerInfo,
    ClusterDescription,
    ConsumedBatch,
    ConsumedRecord,
    ControllerInfo,
    GroupMetadata,
    LogDirInfo,
    NewTopic,
    OffsetAndMetadata,
    PartitionInfo,
    RecordMetadata,
    SetAside,
    TopicDescription,
    TopicPartition,
    TransactionInfo,
)

if TYPE_CHECKING:
    from spark_broker.client.admin import Admin
    from spark_broker.client.consumer import Consumer
    from spark_broker.client.producer import Producer
    from spark_broker.client.rebalance_listener import RebalanceListener
    from spark_broker.client.transaction_group import JoinedProducer, TransactionGroup
    from spark_broker.driver.cluster import BrokerCluster
    from spark_broker.driver.session import configure_spark
    from spark_broker.spark.frames import create_views, read_topic
    from spark_broker.spark.history_stream import stream_history
    from spark_broker.spark.lag import PartitionLag, create_lag_view, group_lag, lag

__version__ = "0.1.0"

__all__ = [
    "BrokerCluster",
    "Admin",
    "Producer",
    "Consumer",
    "NewTopic",
    "TopicPartition",
    "TransactionGroup",
    "configure_spark",
    "read_topic",
    "create_views",
    "stream_history",
    "lag",
    "group_lag",
    "create_lag_view",
    "PartitionLag",
    "BrokerInfo",
    "ClusterDescription",
    "ConsumedBatch",
    "ConsumedRecord",
    "ControllerInfo",
    "GroupDescription",
    "GroupListing",
    "GroupMetadata",
    "GroupOffset",
    "GroupRebalance",
    "LogDirInfo",
    "MemberDescription",
    "OffsetAndMetadata",
    "PartitionInfo",
    "RebalanceListener",
    "RecordMetadata",
    "SetAside",
    "SparkBrokerError",
    "TopicDescription",
    "TransactionInfo",
    "JoinedProducer",
    "errors",
]

_LAZY = {
    "Admin": "spark_broker.client.admin",
    "Consumer": "spark_broker.client.consumer",
    "Producer": "spark_broker.client.producer",
    "RebalanceListener": "spark_broker.client.rebalance_listener",
    "TransactionGroup": "spark_broker.client.transaction_group",
    "JoinedProducer": "spark_broker.client.transaction_group",
    "BrokerCluster": "spark_broker.driver.cluster",
    "configure_spark": "spark_broker.driver.session",
    "read_topic": "spark_broker.spark.frames",
    "create_views": "spark_broker.spark.frames",
    "stream_history": "spark_broker.spark.history_stream",
    "lag": "spark_broker.spark.lag",
    "group_lag": "spark_broker.spark.lag",
    "create_lag_view": "spark_broker.spark.lag",
    "PartitionLag": "spark_broker.spark.lag",
}

_SPARK = ("pyspark", "py4j")


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'spark_broker' has no attribute {name!r}")
    try:
        value: object = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in _SPARK:
            raise
        raise MissingDependencyError(f"{name} needs Spark: pip install 'spark-broker[spark]'") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
