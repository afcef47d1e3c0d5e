"""Whether the metadata log is the one that a broker has seen, or an older copy of it.

A log that was restored from a backup lacks its newest records. A controller that starts on it writes records of its
own, and soon the log is longer than it was. So offsets prove nothing. The *lineage* of a log does: who wrote it, and
from which offset on. Each broker saves where it was in which controller's records (`MetadataSeen`). If the log has no
such place, the broker has seen records that are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from spark_broker.controller.image import MetadataImage
from spark_broker.controller.records import (
    BrokerIdsRecord,
    LaunchRecord,
    MetadataRecord,
    OffsetRecord,
    OlderMetadataRecord,
    PartitionChangeRecord,
    ProducerIdsRecord,
    SchemaIdsRecord,
)
from spark_broker.errors import OlderMetadataError
from spark_broker.model import NO_EPOCH, NO_LEADER
from spark_broker.protocol.messages import MetadataSeen

NUMBERS_SPARED = 1_000_000
"""Producer ids and leader epochs that may have been given out after the copy was made, and that no broker has saved."""

BROKER_IDS_SPARED = 1000
"""For brokers that the copy does not know, and that come later than a new one does."""

SCHEMA_IDS_SPARED = 1000
"""A topic never has more schemas (`topic_schema.SCHEMAS_MAX`), so no more can have been given out after the copy."""


def seen(image: MetadataImage) -> MetadataSeen:
    """What a broker that has applied this image saves of it."""
    return MetadataSeen(
        next_offset=image.next_offset,
        controller_epoch=image.controller_epoch,
        writer=image.controller_writer,
        last_launch=image.last_launch,
        next_broker_id=image.next_broker_id,
        next_producer_id=image.next_producer_id,
    )


def has(image: MetadataImage, known: MetadataSeen) -> bool:
    """Whether the log that this image is of had the place `known`.

    A writer that it has forgotten proves that much: it wrote nothing beyond where the oldest remembered one began.
    """
    writers = image.writers
    if not writers:
        return True
    if known.controller_epoch < writers[0].epoch:
        return known.next_offset <= writers[0].begins
    for writer, ends in zip(writers, [*(w.begins for w in writers[1:]), image.next_offset], strict=True):
        if writer.epoch == known.controller_epoch:
            return writer.name == known.writer and known.next_offset <= ends
    return False


def acceptances(log: MetadataImage | MetadataSeen) -> int:
    """How many times numbers were spared in this log: once for each acceptance of an older copy, or more often."""
    return log.next_offset // NUMBERS_SPARED


def is_accepted(image: MetadataImage) -> bool:
    """Whether an operator has accepted, for this controller, that the log may lack what brokers have seen."""
    return NO_EPOCH < image.older_accepted_epoch == image.controller_epoch


def newer_than(image: MetadataImage, known: MetadataSeen | None) -> MetadataSeen | None:
    """What a broker that registers has seen, where this log does not have it; else None.

    Raises OlderMetadataError, unless an operator has accepted it.
    """
    if known is None or has(image, known):
        return None
    if not is_accepted(image):
        raise OlderMetadataError(
            f"the broker has seen metadata up to offset {known.next_offset} of controller epoch "
            f"{known.controller_epoch}, and metadata.dir has no such records: it is an older copy"
        )
    return known


def beyond(image: MetadataImage, known: MetadataSeen) -> Iterable[MetadataRecord]:
    """The records that take the log beyond every number that a broker has seen.

    Each acceptance of an older copy spares numbers. A broker may have seen as many acceptances as this log has, or
    more. Then a copy from before them was accepted again, and the same leader epochs were spared, and given out. They
    go on beyond all of those, before all replicas are compared and anybody is elected. So do ids of schemas.
    """
    if known.last_launch > image.last_launch:
        yield LaunchRecord(known.last_launch)
    if known.next_broker_id > image.next_broker_id:
        yield BrokerIdsRecord(known.next_broker_id)
    if known.next_producer_id + NUMBERS_SPARED > image.next_producer_id:
        yield ProducerIdsRecord(known.next_producer_id + NUMBERS_SPARED)
    again = acceptances(known) + 1 - acceptances(image)
    if again > 0:
        yield OffsetRecord(max(known.next_offset, image.next_offset) + NUMBERS_SPARED)
        for topic, number, state in image.partitions():
            yield PartitionChangeRecord(
                topic.topic_id,
                number,
                leader=state.leader,
                unclean=state.unclean_epoch == state.leader_epoch,
                leader_epoch=state.leader_epoch + again * NUMBERS_SPARED,
            )
        yield from _spare_schema_ids(image, again)


def accept(image: MetadataImage) -> Sequence[MetadataRecord]:
    """An operator accepts that this log may be older than what brokers have seen.

    No replica is known to be complete then, so every partition waits until all its replicas were compared
    (`unclean.recover`). Offsets of the metadata go on above those that clients have seen: they take a broker with lower
    ones for one that lags behind. Leader epochs go on above those that the lost records may have given out: an epoch
    and an offset must never name two batches. So do producer ids: brokers may not have saved what they were given. Ids
    of brokers go on above those of brokers that the copy does not know. Ids of schemas go on above those in which
    batches may be stored: brokers tell of these schemas before anybody is elected (`topic_schema.adopted`).
    """
    beyond = OffsetRecord(image.next_offset + NUMBERS_SPARED)
    ids = ProducerIdsRecord(image.next_producer_id + NUMBERS_SPARED)
    brokers = BrokerIdsRecord(image.next_broker_id + BROKER_IDS_SPARED)
    schemas = _spare_schema_ids(image, 1)
    return [OlderMetadataRecord(image.controller_epoch), beyond, ids, brokers, *schemas, *_compare_all(image)]


def _spare_schema_ids(image: MetadataImage, times: int) -> Iterable[SchemaIdsRecord]:
    """Internal topics have one schema for ever."""
    for topic in image.topics.values():
        if not topic.internal:
            yield SchemaIdsRecord(topic.topic_id, topic.next_schema_id + times * SCHEMA_IDS_SPARED)


def _compare_all(image: MetadataImage) -> Iterable[PartitionChangeRecord]:
    for topic, number, state in image.partitions():
        yield PartitionChangeRecord(
            topic.topic_id,
            number,
            leader=NO_LEADER,
            isr=[],
            elr=[],
            last_known_elr=list(state.damaged),
            unclean=True,
            leader_epoch=state.leader_epoch + NUMBERS_SPARED,
        )


@dataclass(frozen=True, slots=True)
class NewestBatch:
    """`leader_epoch`: of a replica's newest batch, as far as its files say. `is_empty`: it has none."""

    leader_epoch: int
    is_empty: bool


def may_be_deleted(
    image: MetadataImage, topic_id: str, partition: int, newest: Callable[[], NewestBatch | None]
) -> bool:
    """Whether the metadata proves that a replica that a start finds, and that does not belong there, is needed no more.

    That a topic or a partition is not in the metadata proves nothing: the metadata may be an older copy, and the
    replica one of the last. Proofs are that the topic was deleted, and that the replica was moved away by a decision
    that is newer than all that it has. After an unclean election, it may have records that were lost.
    """
    if topic_id in image.tombstones:
        return True
    state = image.partition(topic_id, partition)
    batch = newest() if state is not None else None
    if state is None or batch is None:
        return False
    return batch.is_empty or state.unclean_epoch <= batch.leader_epoch <= state.leader_epoch
