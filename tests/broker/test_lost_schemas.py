"""Logs whose batches have schemas that the metadata lacks: the broker goes on, and tells the controller of them."""

from __future__ import annotations

import dataclasses
import logging
import random
from types import MappingProxyType

import pyarrow as pa
import pytest

from spark_broker.broker import lost_schemas
from spark_broker.broker.append import Append
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.log_cleaner import LogCleaner
from spark_broker.broker.projection import project_frames
from spark_broker.config import ClusterConfig, TopicConfig
from spark_broker.controller.image import MetadataImage, PartitionRegistration
from spark_broker.errors import OlderMetadataError, UnknownSchemaError
from spark_broker.model import NO_LEADER
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.messages import TopicSchema
from spark_broker.protocol.schema import schema_to_bytes
from spark_broker.storage.start_kind import StartKind
from tests.broker.rig import Outcome
from tests.broker.test_offline_replicas import Broker

SCHEMAS = (pa.schema([("a", pa.int64())]), pa.schema([("a", pa.int64()), ("b", pa.int64())]))
BOTH = tuple(map(schema_to_bytes, SCHEMAS))
SPARED = 1000
CONFIG = TopicConfig(cleanup_policy=("compact",), key_columns=("a",), min_cleanable_dirty_ratio=0.0)


class TypedBroker(Broker):
    """It has one partition of a typed topic. `known`: its schemas as the metadata says."""

    known: tuple[bytes, ...] = BOTH
    spared = 0
    """Ids of schemas below this may have been given out: older metadata was accepted."""

    waits = False
    """Whether the partition has no leader, and its replicas are to be compared."""

    def image(self) -> MetadataImage:
        image = super().image()
        waiting = PartitionRegistration((0,), (), NO_LEADER, self.epoch, self.epoch, unclean_epoch=self.epoch)
        topics = {
            topic_id: dataclasses.replace(
                topic,
                config=MappingProxyType(CONFIG.to_dict()),
                schemas=self.known,
                schema_ids=self.spared,
                partitions=(waiting,) if self.waits else topic.partitions,
            )
            for topic_id, topic in image.topics.items()
        }
        return dataclasses.replace(image, topics=MappingProxyType(topics))

    def add(self, schema_id: int) -> None:
        """Append one record of this schema."""
        row = pa.RecordBatch.from_pylist([{"a": 7, "b": 1}], schema=SCHEMAS[schema_id])
        message = encode_batch(row, schema_id=schema_id)
        outcome = Outcome()
        append = Append(message, self.epoch, -1, schema_id, SYSTEM_CLOCK.boottime_ms() + 30_000)
        self.manager.partition(*self.key("t")).append(append, outcome)
        outcome.future.result(0)


def with_both() -> TypedBroker:
    """Its log has records of both schemas."""
    broker = TypedBroker()
    broker.topics["t"] = 1
    broker.apply()
    broker.directory.update(broker_id=0)
    for schema_id in (0, 1, 0):
        broker.add(schema_id)
    broker.manager.partition(*broker.key("t")).flush()
    return broker


def on_older(before: TypedBroker, *, machine: bool = False, spared: int = SPARED) -> TypedBroker:
    """The next process, which gets metadata without the second schema."""
    fs = before.fs.crash_machine(random.Random(1)) if machine else before.fs.crash_process()
    broker = TypedBroker(fs, before)
    broker.known, broker.spared = BOTH[:1], spared
    return broker


@pytest.mark.parametrize("machine", [False, True], ids=["process", "machine"])
def test_a_schema_that_accepted_metadata_lacks_is_told_before_the_log_end_is(machine: bool) -> None:
    """Story: after a crash of the machine, the segment was compared with a schema that was not there. Every broker with
    a replica ended with an IndexError, at each start.
    """
    broker = on_older(with_both(), machine=machine)
    assert broker.directory.start_kind is (StartKind.MACHINE_CRASH if machine else StartKind.PROCESS_CRASH)
    broker.waits = True
    broker.apply()
    assert not broker.manager.offline
    assert broker.rows("t") == 3
    assert broker.manager.lost_schemas() == [TopicSchema(broker.id_of("t"), 1, BOTH[1])]
    assert broker.manager.log_ends() == [], "nobody is elected before the records can be read"
    broker.known = BOTH
    broker.apply()
    assert broker.manager.lost_schemas() == []
    assert [end.log_end_offset for end in broker.manager.log_ends()] == [3]


def test_more_than_one_heartbeat_takes_is_told_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_schemas, "TOLD_BYTES", 1)
    broker = on_older(with_both())
    broker.known, broker.waits = (), True
    broker.apply()
    for known in (BOTH[:1], BOTH):
        newest = len(known) - 1
        assert broker.manager.lost_schemas() == [TopicSchema(broker.id_of("t"), newest, BOTH[newest])]
        assert broker.manager.log_ends() == []
        broker.known = known
        broker.apply()
    assert broker.manager.lost_schemas() == []
    assert broker.manager.log_ends()


@pytest.mark.parametrize("machine", [False, True], ids=["process", "machine"])
def test_metadata_that_lacks_a_schema_is_older_unless_it_was_accepted(machine: bool) -> None:
    """No broker had saved yet what it had seen. The next schema would have got the same id."""
    broker = on_older(with_both(), machine=machine, spared=0)
    with pytest.raises(OlderMetadataError, match="its log has schema 1"):
        broker.apply()
    whole = on_older(broker)
    whole.known = BOTH
    whole.apply()
    assert whole.rows("t") == 3


def test_who_reads_records_of_an_unknown_schema_gets_a_typed_error() -> None:
    broker = on_older(with_both())
    broker.apply()
    partition = broker.manager.partition(*broker.key("t"))
    frames = partition.read_log(0, 1 << 20, 3)
    for read in (
        lambda: partition.reader.decode(frames[1]),
        lambda: project_frames(frames, partition.topic, ["a"], 1 << 20),
    ):
        with pytest.raises(UnknownSchemaError) as refused:
            read()
        assert refused.value.retriable
    assert partition.reader.decode(frames[0]).to_pylist() == [{"a": 7}]
    broker.known = BOTH
    broker.apply()
    assert partition.reader.decode(frames[1]).to_pylist() == [{"a": 7, "b": 1}]


def test_a_log_with_an_unknown_schema_is_compacted_once_it_is_known() -> None:
    """Story: the first pass ended every broker with a replica, one start after the other."""
    broker = on_older(with_both())
    broker.apply()
    cleaner = LogCleaner(broker.manager, ClusterConfig())
    assert cleaner.next_pass() is None
    broker.known = BOTH
    broker.apply()
    partition = cleaner.next_pass()
    assert partition is not None
    for _ in cleaner.steps(partition):
        pass
    assert broker.rows("t") == 2, "the first record of the key is gone"


def test_rows_that_do_not_decode_end_neither_the_broker_nor_the_cleaner(caplog: pytest.LogCaptureFixture) -> None:
    """Story: an id that was given out twice had another schema. The cleaner could not read the rows: the broker ended.

    The replica is left alone until its topic changes; others are still compacted.
    """
    broker = on_older(with_both())
    broker.known = (BOTH[0], schema_to_bytes(pa.schema([("a", pa.string()), ("b", pa.string())])))
    broker.apply()
    cleaner = LogCleaner(broker.manager, ClusterConfig())
    partition = cleaner.next_pass()
    assert partition is not None
    with caplog.at_level(logging.WARNING):
        for _ in cleaner.steps(partition):
            pass
    assert "t-0 is not compacted: it has rows that cannot be read" in caplog.text
    assert cleaner.next_pass() is None
    broker.known = BOTH
    broker.apply()
    assert cleaner.next_pass() is partition
