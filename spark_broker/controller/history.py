"""Decisions about the history of topics: which commits to a Delta table count, and why tiering has stopped."""

from __future__ import annotations

from itertools import zip_longest

from spark_broker.controller.effects import Decision
from spark_broker.controller.image import MetadataImage, TopicState
from spark_broker.controller.records import HistoryRecord, HistoryStatusRecord
from spark_broker.controller.topic_history import TopicHistory, not_below
from spark_broker.errors import (
    HistoryConflictError,
    InvalidRequestError,
    StaleControllerEpochError,
    UnknownTopicIdError,
)
from spark_broker.protocol.messages import ConfirmHistoryRequest, EmptyResponse, ReportTieringRequest


def confirm_history(image: MetadataImage, request: ConfirmHistoryRequest) -> Decision:
    """Record a commit that the tierer has read back. A repetition changes nothing.

    Its answer is certain: a controller that was replaced does not know what its successor has recorded. So a tierer
    that repeats what it knows learns whether that is still so.

    Raises UnknownTopicIdError, StaleControllerEpochError (the tierer began under an earlier controller),
    HistoryConflictError (another table, an older commit, or a newer leader) or InvalidRequestError (offsets that cannot
    be).
    """
    topic = _topic(image, request.topic_id)
    if request.controller_epoch != image.controller_epoch:
        raise StaleControllerEpochError(
            f"tiering of {topic.name} began in controller epoch {request.controller_epoch}, "
            f"now it is {image.controller_epoch}",
            hint="Tier again: what was committed to the table is found there, and nothing is written twice.",
        )
    history = topic.history or TopicHistory()
    if history.table_id not in ("", request.table_id):
        raise HistoryConflictError(f"the history of {topic.name} is in table {history.table_id}")
    starts, ends = tuple(request.starts), tuple(request.ends)
    known = (history.version, history.starts, history.ends, history.uncut)
    if (request.version, starts, ends, request.uncut) == known:
        return Decision((), EmptyResponse(), certain=True)
    if request.version <= history.version:
        raise HistoryConflictError(f"version {request.version} of {topic.name}: {history.version} was confirmed before")
    _check_offsets(topic, history, starts, ends)
    _check_leaders(topic, history, request)
    record = HistoryRecord(
        topic.topic_id,
        request.table_id,
        request.version,
        request.table_version,
        request.starts,
        request.ends,
        request.quarantined,
        _end_epochs(history, request),
        request.uncut,
    )
    return Decision((record,), EmptyResponse())


def _end_epochs(history: TopicHistory, request: ConfirmHistoryRequest) -> list[int]:
    """Where a history does not grow, its end has the epoch that it had."""
    asked = zip_longest(request.ends, request.end_epochs[: len(request.ends)], fillvalue=-1)
    return [
        epoch if end > history.range_of(number)[1] else history.end_epoch(number)
        for number, (end, epoch) in enumerate(asked)
    ]


def _check_offsets(topic: TopicState, history: TopicHistory, starts: tuple[int, ...], ends: tuple[int, ...]) -> None:
    if len(starts) != len(ends) or len(ends) > len(topic.partitions):
        raise InvalidRequestError(f"{len(starts)} starts and {len(ends)} ends for {len(topic.partitions)} partitions")
    risen = not_below(starts, history.starts) and not_below(ends, history.ends)
    if not risen or not not_below(ends, starts) or min(starts, default=0) < 0:
        raise InvalidRequestError(f"history of {topic.name} from {starts} to {ends}, after {history}")


def _check_leaders(topic: TopicState, history: TopicHistory, request: ConfirmHistoryRequest) -> None:
    """Check that no partition whose history grows has a newer leader, which may lack what was tiered."""
    for number, (epoch, end) in enumerate(zip(request.leader_epochs, request.ends, strict=False)):
        grows = end > history.range_of(number)[1]
        if grows and epoch != topic.partitions[number].leader_epoch:
            raise HistoryConflictError(
                f"{topic.name}-{number} was tiered in leader epoch {epoch}, "
                f"now it is {topic.partitions[number].leader_epoch}"
            )


def report_tiering(image: MetadataImage, request: ReportTieringRequest) -> Decision:
    """Record why tiering has stopped, or that it goes on, and whether the table has the history.

    A run that did not look changes nothing of the latter. One that goes on has found it. Raises UnknownTopicIdError.
    """
    topic = _topic(image, request.topic_id)
    history = topic.history or TopicHistory()
    missing = history.missing and bool(request.stopped) if request.found is None else not request.found
    if (request.stopped, missing) == (history.stopped, history.missing):
        return Decision((), EmptyResponse())
    return Decision((HistoryStatusRecord(topic.topic_id, request.stopped, missing),), EmptyResponse())


def _topic(image: MetadataImage, topic_id: str) -> TopicState:
    if topic_id not in image.topics:
        raise UnknownTopicIdError(f"topic {topic_id}")
    return image.topics[topic_id]
