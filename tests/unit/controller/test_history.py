"""Which commits to a topic's Delta table the controller records, and what it says of them."""

from __future__ import annotations

import msgspec
import pytest

from spark_broker.controller.decisions import Decisions
from spark_broker.controller.delta import MetadataDelta
from spark_broker.controller.effects import Reply
from spark_broker.controller.events import CallReceived
from spark_broker.controller.records import HistoryRecord, HistoryStatusRecord, decode_records, encode_records
from spark_broker.controller.snapshot import image_from_snapshot, to_records
from spark_broker.controller.topic_history import TopicHistory
from spark_broker.errors import (
    HistoryConflictError,
    InvalidRequestError,
    InvariantError,
    StaleControllerEpochError,
    UnknownTopicIdError,
)
from spark_broker.protocol.messages import (
    AnnounceTieringRequest,
    ConfirmHistoryRequest,
    CreatePartitionsRequest,
    MetadataRequest,
    MetadataResponse,
    ReportTieringRequest,
)
from tests.unit.controller.cluster import Cluster

TABLE = "a-table"


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    cluster.start_brokers(1)
    cluster.create_topic("t", partitions=2, factor=1, config={"delta.path": "/lake/t"})
    return cluster


def confirm(cluster: Cluster, version: int, ends: list[int], **other: object) -> None:
    values: dict[str, object] = {
        "topic_id": cluster.topic().topic_id,
        "controller_epoch": cluster.image.controller_epoch,
        "table_id": TABLE,
        "version": version,
        "table_version": version + 10,
        "starts": [0] * len(ends),
        "ends": ends,
    }
    cluster.call(ConfirmHistoryRequest(**{**values, **other}))  # type: ignore[arg-type]


def history(cluster: Cluster) -> TopicHistory:
    found = cluster.topic().history
    assert found is not None
    return found


def test_a_commit_that_was_read_back_is_recorded(cluster: Cluster) -> None:
    assert cluster.topic().history is None
    confirm(cluster, 0, [5, 0])
    assert history(cluster) == TopicHistory(TABLE, 0, 10, (0, 0), (5, 0), end_epochs=(-1, -1))
    assert (history(cluster).range_of(0), history(cluster).range_of(7)) == ((0, 5), (0, 0))
    confirm(cluster, 1, [5, 9])
    assert (history(cluster).version, history(cluster).ends) == (1, (5, 9))
    assert "has history in version 11 of its table" in " ".join(cluster.notes)


def test_a_commit_whose_leader_was_replaced_since_is_not_recorded(cluster: Cluster) -> None:
    """After an unclean election the new leader may lack what was tiered: the tierer must look."""
    confirm(cluster, 0, [5, 0])
    epochs = [state.leader_epoch for state in cluster.topic().partitions]
    for partition in (0, 1):
        older = [epoch - (number == partition) for number, epoch in enumerate(epochs)]
        with pytest.raises(HistoryConflictError, match=f"t-{partition} was tiered in leader epoch"):
            confirm(cluster, 1, [6, 9], leader_epochs=older)
    confirm(cluster, 1, [5, 9], leader_epochs=[epochs[0] - 1, epochs[1]])
    assert history(cluster).ends == (5, 9), "nothing of partition 0 is new"
    confirm(cluster, 2, [6, 9], leader_epochs=epochs)
    assert history(cluster).ends == (6, 9)


def test_the_epoch_at_the_end_of_a_history_is_the_one_with_which_it_grew_there(cluster: Cluster) -> None:
    confirm(cluster, 0, [5, 0], end_epochs=[3, -1])
    confirm(cluster, 1, [5, 9], end_epochs=[-1, 4])
    assert history(cluster).end_epochs == (3, 4), "nothing of partition 0 is new"
    confirm(cluster, 2, [6, 9])
    assert history(cluster).end_epochs == (-1, 4)
    assert (history(cluster).end_epoch(1), history(cluster).end_epoch(7)) == (4, -1)


def test_a_commit_whose_table_is_to_be_cut_is_recorded_once(cluster: Cluster) -> None:
    """Of two tries that find it, one under the leader that lost records and one under another, the first one counts."""
    confirm(cluster, 0, [5, 5])
    confirm(cluster, 1, [7, 5], uncut=True)
    assert (history(cluster).ends, history(cluster).uncut) == ((7, 5), True)
    before = cluster.image.next_offset
    confirm(cluster, 1, [7, 5], uncut=True)
    assert cluster.image.next_offset == before
    for ends, uncut in (([9, 9], False), ([7, 5], False), ([6, 5], True)):
        with pytest.raises(HistoryConflictError):
            confirm(cluster, 1, ends, uncut=uncut)
    assert image_from_snapshot(to_records(cluster.image), cluster.image.next_offset) == cluster.image
    confirm(cluster, 2, [7, 5])
    assert not history(cluster).uncut


def test_a_repetition_changes_nothing_and_its_answer_is_certain(cluster: Cluster) -> None:
    """Who is answered relies on it that nothing else is recorded. A controller that was replaced does not know."""
    confirm(cluster, 0, [5, 0])
    offset, before = cluster.image.next_offset, history(cluster)
    confirm(cluster, 0, [5, 0])
    assert (cluster.certain, cluster.image.next_offset, history(cluster)) == (True, offset, before)
    for certain in (False, True):
        cluster.call(MetadataRequest(certain=certain))
        assert cluster.certain == certain


def test_a_certain_answer_waits_for_the_metadata_log_and_events_wait_behind_it(cluster: Cluster) -> None:
    decisions, image = Decisions(cluster.controller), cluster.image
    assert decisions.decide([CallReceived(900, MetadataRequest())], image, cluster.now_ms) == []
    assert [type(effect) for effect in decisions.committed()] == [Reply]
    assert decisions.decide([CallReceived(901, MetadataRequest(certain=True))], image, cluster.now_ms) == []
    assert decisions.is_writing
    later = CallReceived(902, MetadataRequest())
    decisions.let_wait(later, cluster.now_ms)
    assert [type(effect) for effect in decisions.committed()] == [Reply]
    assert (decisions.is_writing, decisions.next_events()) == (False, [later])


def test_that_nothing_is_recorded_yet_can_be_repeated_until_something_is(cluster: Cluster) -> None:
    confirm(cluster, -1, [], table_id="")
    assert cluster.certain
    confirm(cluster, 0, [5, 0])
    with pytest.raises(HistoryConflictError):
        confirm(cluster, -1, [], table_id="")


@pytest.mark.parametrize(
    ("version", "ends", "other", "error"),
    [
        (3, [6, 6], {"table_id": "another"}, HistoryConflictError),
        (2, [6, 6], {}, HistoryConflictError),
        (1, [9, 9], {}, HistoryConflictError),
        (3, [9, 9], {"controller_epoch": -1}, StaleControllerEpochError),
        (3, [9, 9], {"topic_id": "f" * 32}, UnknownTopicIdError),
        (3, [5, 4], {}, InvalidRequestError),
        (3, [9], {}, InvalidRequestError),
        (3, [9, 9, 9], {}, InvalidRequestError),
        (3, [9, 9], {"starts": [0]}, InvalidRequestError),
        (3, [9, 9], {"starts": [10, 0]}, InvalidRequestError),
    ],
)
def test_a_commit_that_cannot_follow_is_refused(
    cluster: Cluster, version: int, ends: list[int], other: dict[str, object], error: type[Exception]
) -> None:
    confirm(cluster, 2, [5, 5])
    before = cluster.image.next_offset
    with pytest.raises(error):
        confirm(cluster, version, ends, **other)
    assert cluster.image.next_offset == before


def test_a_partition_that_was_added_joins_the_history(cluster: Cluster) -> None:
    confirm(cluster, 0, [5, 5])
    cluster.call(CreatePartitionsRequest("t", 3))
    confirm(cluster, 1, [5, 5, 7])
    assert history(cluster).ends == (5, 5, 7)


def test_tiering_says_why_it_stopped_and_that_it_goes_on(cluster: Cluster) -> None:
    topic_id = cluster.topic().topic_id
    cluster.call(ReportTieringRequest(topic_id, "the table is gone"))
    assert history(cluster) == TopicHistory(stopped="the table is gone")
    confirm(cluster, 0, [5, 5])
    assert history(cluster).stopped == "the table is gone", "only the tierer says that it goes on"
    offset = cluster.image.next_offset
    cluster.call(ReportTieringRequest(topic_id, "the table is gone"))
    assert cluster.image.next_offset == offset
    cluster.call(ReportTieringRequest(topic_id, ""))
    assert history(cluster) == TopicHistory(TABLE, 0, 10, (0, 0), (5, 5), end_epochs=(-1, -1))
    with pytest.raises(UnknownTopicIdError):
        cluster.call(ReportTieringRequest("f" * 32, ""))


def test_a_history_that_a_run_did_not_find_is_missing_until_a_run_finds_it(cluster: Cluster) -> None:
    confirm(cluster, 0, [5, 5])
    topic_id = cluster.topic().topic_id
    reports = [
        (ReportTieringRequest(topic_id, "a column has another type"), False),
        (ReportTieringRequest(topic_id, "the table is gone", found=False), True),
        (ReportTieringRequest(topic_id, "gave up after 5 tries"), True),  # It has not looked.
        (ReportTieringRequest(topic_id, "gave up after 5 tries", found=True), False),
        (ReportTieringRequest(topic_id, "the table is gone", found=False), True),
        (ReportTieringRequest(topic_id, ""), False),  # From a tierer that knows no `found`: it has succeeded.
    ]
    for report, missing in reports:
        before = cluster.image
        cluster.call(report)
        assert (history(cluster).stopped, history(cluster).missing) == (report.stopped, missing)
        assert [topic.history for topic in MetadataDelta(before, cluster.image).topics_changed] == [history(cluster)]
        copied = decode_records(encode_records(to_records(cluster.image)))
        assert image_from_snapshot(copied, cluster.image.next_offset) == cluster.image
        offset = cluster.image.next_offset
        cluster.call(report)
        assert cluster.image.next_offset == offset, "a repetition changes nothing"
    assert "is not found in its table: the table is gone" in " ".join(cluster.notes)
    assert "is found in its table again" in " ".join(cluster.notes)


def test_a_status_of_an_older_controller_says_nothing_is_missing() -> None:
    (record,) = decode_records(msgspec.msgpack.encode([[15, "f" * 32, "why"]]))
    assert record == HistoryStatusRecord("f" * 32, "why", missing=False)


def test_only_the_controller_says_when_the_cluster_tiers_next_and_it_counts_down(cluster: Cluster) -> None:
    topic_id, offset = cluster.topic().topic_id, cluster.image.next_offset

    def next_ms() -> list[int]:
        answer = cluster.call(MetadataRequest(["t"], certain=True))
        assert isinstance(answer, MetadataResponse)
        return [topic.next_tiering_ms for topic in answer.topics]

    assert next_ms() == [-1]
    cluster.call(AnnounceTieringRequest({topic_id: 60_000, "f" * 32: 5}))
    cluster.now_ms += 20_000
    assert next_ms() == [40_000]
    cluster.now_ms += 50_000
    assert next_ms() == [0]
    cluster.call(AnnounceTieringRequest({}))
    assert next_ms() == [-1]
    assert cluster.image.next_offset == offset, "nothing of it is recorded"


def test_a_snapshot_keeps_history_and_status(cluster: Cluster) -> None:
    confirm(cluster, 4, [5, 5])
    cluster.call(ReportTieringRequest(cluster.topic().topic_id, "the table is gone"))
    records = decode_records(encode_records(to_records(cluster.image)))
    assert image_from_snapshot(records, cluster.image.next_offset) == cluster.image


@pytest.mark.parametrize(
    "record",
    [
        HistoryRecord("", "another", 9, 9, [0, 0], [9, 9]),
        HistoryRecord("", TABLE, 0, 9, [0, 0], [9, 9]),
        HistoryRecord("", TABLE, 9, 9, [0, 0], [9, 4]),
        HistoryRecord("", TABLE, 9, 9, [0, 0], [9]),
    ],
)
def test_no_record_takes_a_history_back(cluster: Cluster, record: HistoryRecord) -> None:
    confirm(cluster, 1, [5, 5])
    fields = (record.table_id, record.version, record.table_version, record.starts, record.ends)
    with pytest.raises(InvariantError):
        cluster.image.apply([HistoryRecord(cluster.topic().topic_id, *fields)])


def test_brokers_hear_how_far_the_history_reaches(cluster: Cluster) -> None:
    """Their retention deletes nothing beyond it."""
    before = cluster.image
    confirm(cluster, 0, [5, 0])
    delta = MetadataDelta(before, cluster.image)
    assert [topic.history for topic in delta.topics_changed] == [history(cluster)]
    assert delta.partitions_changed == []
