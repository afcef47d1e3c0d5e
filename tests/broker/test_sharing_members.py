"""Members that share, leave, stand still and are killed, on real brokers: the checker finds nothing wrong."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from spark_broker import Admin, NewTopic
from spark_broker.model import TopicPartition
from spark_broker.testing.checker import check_history
from spark_broker.testing.client_thread import ClientThread
from spark_broker.testing.group_workload import Sharing, SharingMember
from spark_broker.testing.history import Assigned, Gone, OffsetsCommitted, Polled, Revoked
from spark_broker.testing.history_file import save_history
from spark_broker.testing.member_process import MemberProcess
from spark_broker.testing.recorder import HistoryRecorder
from spark_broker.testing.report import explain
from spark_broker.testing.workload import RecordingWriter, snapshot_with_consumer
from tests.conftest import WaitUntil
from tests.support.process_cluster import ProcessCluster

TOPIC, PARTITIONS = "shared", 6
SHARING = Sharing("sharing", (TOPIC,), session_timeout_ms=2000, max_poll_interval_ms=1500, leaves=0.1, freezes=0.1)


@pytest.mark.full
@pytest.mark.timeout(180)
def test_members_that_come_and_go_share_one_owner_at_a_time(
    process_cluster: ProcessCluster, wait_until: WaitUntil, tmp_path: Path
) -> None:
    servers, recorder = process_cluster.bootstrap_servers, HistoryRecorder()
    with Admin(servers) as admin:
        admin.create_topic(NewTopic(TOPIC, PARTITIONS, 3))
    members = [SharingMember(recorder, servers, SHARING, name=f"member-{n}", seed=n) for n in range(3)]
    process = MemberProcess(recorder, servers, SHARING, name="process", seed=1, life_s=3.0)
    writer = RecordingWriter(recorder, servers, TOPIC, PARTITIONS, interval_s=0.02)

    def have_come_and_gone() -> bool:
        events = recorder.history().events
        lost = Counter(e.lost for e in events if isinstance(e, Revoked))
        gone = sum(isinstance(e, Gone) for e in events)
        return gone >= 2 and min(m.lives for m in members) >= 2 and min(lost[True], lost[False]) >= 2

    clients: list[RecordingWriter | ClientThread] = [writer, *members, process]
    with ExitStack() as running:
        for client in clients:
            running.enter_context(client)
        wait_until(have_come_and_gone, "members that leave, stand still and are killed", timeout_s=90)
        for client in clients:
            client.stop()
    snapshot_with_consumer(recorder, servers, [TopicPartition(TOPIC, number) for number in range(PARTITIONS)])

    history = recorder.history()
    save_history(history, tmp_path / "history.jsonl")
    result = check_history(history)
    assert result.ok, explain(history, result)
    kinds = Counter(type(event) for event in history.events)
    assert 2 <= kinds[Gone] <= process.kills, "one that is killed before it has joined owned nothing"
    assert min(kinds[kind] for kind in (Assigned, Polled, OffsetsCommitted)) > 10
