"""What the metadata says may go is removed by the thread that works on files, never by the one that keeps the lease."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import MappingProxyType

import pytest

from spark_broker.broker.append import Append
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.partition import Partition
from spark_broker.broker.replica_files import TRIMS_AT_ONCE
from spark_broker.controller.image import MetadataImage, TopicState
from spark_broker.controller.topic_history import TopicHistory
from spark_broker.core.replica import ACKS_ALL
from spark_broker.errors import OffsetOutOfRangeError
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.testing.simulation.operations import Operation
from tests.broker.lone_partition import BIG
from tests.broker.rig import Outcome, batch
from tests.broker.test_offline_replicas import Broker

PARTITIONS = TRIMS_AT_ONCE + 2
RECORDS = 6
LAST_SEGMENT = 4


class TrimmedBroker(Broker):
    """Leads the partitions of a topic, each of which has two records a segment."""

    def __init__(self, **config: str) -> None:
        super().__init__()
        self.config = {"segment.bytes": "4096", **config}
        self.known: Callable[[TopicState], TopicState] = lambda topic: topic
        self.topics["t"] = PARTITIONS
        self.apply()
        self.work()
        for partition in self.partitions():
            for _ in range(RECORDS):
                message = encode_batch(batch(b"x" * BIG))
                deadline_ms = SYSTEM_CLOCK.boottime_ms() + 30_000
                partition.append(Append(message, self.epoch, ACKS_ALL, 0, deadline_ms), Outcome())

    def partitions(self) -> list[Partition]:
        return [self.manager.partition(*self.key("t", number)) for number in range(PARTITIONS)]

    def log_starts(self) -> list[int]:
        """Where the files of each partition begin."""
        directories = [partition.log.directory for partition in self.partitions()]
        names = [[name for name in self.fs.list_directory(path) if name.endswith(".arrow")] for path in directories]
        return [min(int(name.removesuffix(".arrow")) for name in segments) for segments in names]

    def image(self) -> MetadataImage:
        image = super().image()
        topics = {
            topic_id: dataclasses.replace(topic, config=MappingProxyType({**topic.config, **self.config}))
            for topic_id, topic in image.topics.items()
        }
        if self.id_of("t") in topics:
            topics[self.id_of("t")] = self.known(topics[self.id_of("t")])
        return dataclasses.replace(image, topics=MappingProxyType(topics))

    def apply_at_once(self) -> list[Operation]:
        """Apply the topic as it is known now. Returns what the disk did meanwhile."""
        operations: list[Operation] = []
        self.fs.on_operation = lambda operation: operations.append(operation)
        self.apply()
        self.fs.on_operation = None
        return operations


@pytest.fixture(params=["deleted", "tiered"])
def trimmed(request: pytest.FixtureRequest) -> TrimmedBroker:
    """Its records up to LAST_SEGMENT may go, as the metadata is to say."""
    if request.param == "deleted":
        broker = TrimmedBroker()
        broker.known = lambda topic: dataclasses.replace(topic, log_starts=(LAST_SEGMENT,) * PARTITIONS)
    else:
        broker = TrimmedBroker(**{"storage.format": "delta", "delta.path": "/lake"})
        history = TopicHistory(starts=(0,) * PARTITIONS, ends=(LAST_SEGMENT,) * PARTITIONS)
        broker.known = lambda topic: dataclasses.replace(topic, history=history)
    return broker


def test_metadata_does_not_wait_until_the_disk_has_removed_what_may_go(trimmed: TrimmedBroker) -> None:
    """Story: records of a topic of 500 partitions were deleted. Its leader synced six files a partition in the thread
    that reads the answers to heartbeats, and lost its lease: no topic could be written to, and nobody else was elected.
    """
    assert trimmed.apply_at_once() == []
    assert trimmed.asked_to_work
    assert trimmed.log_starts() == [0] * PARTITIONS
    trimmed.work()
    assert trimmed.log_starts() == [LAST_SEGMENT] * PARTITIONS
    assert not trimmed.failures


def test_deleted_records_are_out_of_reach_before_their_files_are_gone() -> None:
    broker = TrimmedBroker()
    broker.known = lambda topic: dataclasses.replace(topic, log_starts=(3,) * PARTITIONS)
    broker.apply()
    reader = broker.partitions()[0].reader
    with pytest.raises(OffsetOutOfRangeError):
        reader.read(-1, 2, 1 << 20, read_committed=True)
    assert reader.read(-1, 3, 1 << 20, read_committed=True).frames


def test_new_replicas_do_not_wait_for_trims(trimmed: TrimmedBroker) -> None:
    trimmed.apply()
    trimmed.topics["new"] = 1
    trimmed.apply()
    assert trimmed.manager.work(), "there is more to do"
    assert trimmed.write("new", b"v") == 0
    assert trimmed.log_starts() == [0] * PARTITIONS
    assert trimmed.manager.work()
    assert trimmed.log_starts().count(LAST_SEGMENT) == TRIMS_AT_ONCE


def test_a_replica_that_is_gone_is_not_trimmed(trimmed: TrimmedBroker) -> None:
    trimmed.apply()
    trimmed.elsewhere.add("t")
    trimmed.apply()
    trimmed.work()
    assert trimmed.directories() == []
    assert not trimmed.failures
