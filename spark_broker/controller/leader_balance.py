"""Elections on demand, and automatic elections of preferred leaders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.effects import Decision
from spark_broker.controller.image import MetadataImage, PartitionRegistration, TopicState
from spark_broker.controller.log_ends import LogEnds
from spark_broker.controller.named_topic import named_partition
from spark_broker.controller.partition_change import change
from spark_broker.controller.records import MetadataRecord
from spark_broker.controller.unclean import elect_uncleanly
from spark_broker.errors import (
    ElectionNotNeededError,
    PreferredLeaderNotAvailableError,
    SparkBrokerError,
)
from spark_broker.protocol.messages import ElectionResult, ElectLeadersRequest, ElectLeadersResponse

Partition = tuple[TopicState, int, PartitionRegistration]


def elect_leaders(
    image: MetadataImage, ends: LogEnds, request: ElectLeadersRequest, disks: Disks = ALL_WELL
) -> Decision:
    """Every partition is judged by itself; one that stays as it is has the reason in its result.

    Where none is named, all are judged, and those that need no election are left out. Raises
    UnknownTopicOrPartitionError and InconsistentTopicIdError.
    """
    records: list[MetadataRecord] = []
    results: list[ElectionResult] = []
    for topic, number, state in _asked(image, request):
        code, message = 0, ""
        try:
            if request.unclean:
                records += elect_uncleanly(image, ends, topic, number, state, disks)
            else:
                records += _elect_preferred(image, topic, number, state, disks)
        except ElectionNotNeededError as error:
            if request.partitions is None:
                continue
            code, message = error.code, error.message
        except SparkBrokerError as error:
            code, message = error.code, error.message
        results.append(ElectionResult(topic.name, number, code, message))
    return Decision(tuple(records), ElectLeadersResponse(results))


def _asked(image: MetadataImage, request: ElectLeadersRequest) -> Iterable[Partition]:
    if request.partitions is None:
        return image.partitions()
    named: list[Partition] = []
    for name, number in dict.fromkeys(request.partitions):
        topic, state = named_partition(image, name, number, request.topic_ids.get(name, ""))
        named.append((topic, number, state))
    return named


def _elect_preferred(
    image: MetadataImage, topic: TopicState, number: int, state: PartitionRegistration, disks: Disks
) -> tuple[MetadataRecord, ...]:
    """Raises ElectionNotNeededError, PreferredLeaderNotAvailableError."""
    preferred = state.replicas[0]
    if preferred == state.leader:
        raise ElectionNotNeededError(f"broker {preferred} leads {topic.name}-{number}")
    if preferred not in state.isr or not image.is_live(preferred):
        why = "not in sync" if image.is_live(preferred) else "not live"
        raise PreferredLeaderNotAvailableError(f"broker {preferred}, preferred for {topic.name}-{number}, is {why}")
    if disks.is_offline(preferred, (topic.topic_id, number)):
        why = "cannot use its replica's files; its log says why"
        raise PreferredLeaderNotAvailableError(f"broker {preferred}, preferred for {topic.name}-{number}, {why}")
    if preferred in disks.full:
        why = "has no room on its disk"
        raise PreferredLeaderNotAvailableError(f"broker {preferred}, preferred for {topic.name}-{number}, {why}")
    record = change(topic, number, state, leader=preferred)
    return () if record is None else (record,)


def balance_leaders(
    image: MetadataImage, imbalance_percentage: int, disks: Disks = ALL_WELL
) -> tuple[MetadataRecord, ...]:
    """The automatic election: a broker regains its preferred partitions if others lead more than this share of them."""
    preferred: Counter[int] = Counter()
    elsewhere: Counter[int] = Counter()
    for _, _, state in image.partitions():
        preferred[state.replicas[0]] += 1
        elsewhere[state.replicas[0]] += state.leader != state.replicas[0]
    due = {b for b in preferred if elsewhere[b] * 100 > preferred[b] * imbalance_percentage and image.is_live(b)}
    due.difference_update(disks.full)
    records: list[MetadataRecord] = []
    for topic, number, state in image.partitions():
        first = state.replicas[0]
        offline = disks.is_offline(first, (topic.topic_id, number))
        if first in due and first != state.leader and first in state.isr and not offline:
            record = change(topic, number, state, leader=first)
            records += [] if record is None else [record]
    return tuple(records)
