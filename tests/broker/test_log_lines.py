"""A broker's log: each change of state is one line with who, what, which epoch and why."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from spark_broker.broker.log_format import JSON, TEXT, fields_of, formatter
from spark_broker.broker.proposal_queue import ProposalQueue, announce, request_of, settle, still_open
from spark_broker.broker.replica_lines import FLAPPING_MS, ConnectionLines
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.slow import SlowLog
from spark_broker.core.effects import ProposeIsr
from spark_broker.core.replica import Diverging, Fetched, LeaderAndIsr
from spark_broker.errors import IneligibleReplicaError, NetworkError, UnknownTopicOrPartitionError
from spark_broker.protocol.messages import (
    AlterIsrResult,
    AlterPartitionRequest,
    AlterPartitionResponse,
    ReplicaStateResponse,
)
from spark_broker.protocol.messages.control import ISR_CHANGES_MAX
from spark_broker.storage.start_kind import StartKind
from tests.broker.lone_partition import LonePartition
from tests.broker.test_fetch_session import append, elect


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


class NamedPartition:
    """A partition that only has a name and counts refusals."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.refused = 0
        self.replica = SimpleNamespace(log_end_offset=500)

    def __str__(self) -> str:
        return self.name

    def isr_refused(self, *_: int) -> None:
        self.refused += 1


def manager(partitions: int) -> ReplicaManager:
    named = {("t", number): NamedPartition(f"t-{number}") for number in range(partitions)}
    return cast("ReplicaManager", SimpleNamespace(find=lambda *key: named.get(key)))


def queue(partitions: int) -> ProposalQueue:
    waiting = ProposalQueue()
    reason = "broker 3 ends at 120, the leader at 500"
    for number in range(partitions):
        waiting.add(("t", number), ProposeIsr(7, 12, ((1, 5), (2, 6)), reason=reason))
    return waiting


def test_what_a_leader_asks_for_is_said_once_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    waiting = queue(1)
    proposals = waiting.take()
    announce(manager(1), waiting.take_news())
    waiting.put_back(still_open(cast("ReplicaManager", SimpleNamespace(find=lambda *_: _Current())), proposals))
    assert waiting.take() == proposals
    announce(manager(1), waiting.take_news())
    assert lines(caplog) == [
        "t-0: asks for ISR (1, 2) in leader epoch 7: broker 3 ends at 120, the leader at 500",
    ]


def test_a_request_has_no_more_proposals_than_the_controller_takes() -> None:
    """Story: with more than 10,000 that waited, each request was refused whole, and no ISR of the broker changed."""
    waiting, topic = ProposalQueue(), "0" * 32
    for number in range(ISR_CHANGES_MAX + 5):
        waiting.add((topic, number), ProposeIsr(7, 12, ((1, 5), (2, 6))))
    first = waiting.take()
    assert list(first) == [(topic, number) for number in range(ISR_CHANGES_MAX)]
    assert len(decoded(request_of(_numbered(), first)).changes) == ISR_CHANGES_MAX
    waiting.settled()
    assert waiting.is_due
    second = waiting.take()
    assert list(second) == [(topic, ISR_CHANGES_MAX + number) for number in range(5)]
    waiting.settled()
    assert not waiting.is_due


def _numbered() -> ReplicaManager:
    return cast("ReplicaManager", SimpleNamespace(broker_id=1, broker_epoch=1))


def decoded(request: AlterPartitionRequest) -> AlterPartitionRequest:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=AlterPartitionRequest)


class _Current:
    def is_current(self, _: ProposeIsr) -> bool:
        return True


def test_a_follower_of_hundreds_of_partitions_that_lags_is_one_line_of_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    announce(manager(334), queue(334).take_news())
    asked = "asks for ISR (1, 2) in leader epoch 7: broker 3 ends at 120, the leader at 500"
    assert lines(caplog) == [f"t-{number}: {asked}" for number in range(334)]


def test_the_controllers_answer_to_a_proposal_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    code = IneligibleReplicaError.code
    results = [AlterIsrResult("t", 0, code, "broker 2 is not live"), AlterIsrResult("t", 1, 0, "")]
    settle(manager(2), AlterPartitionResponse(results), queue(2).take())
    refused, taken = lines(caplog)
    why = "INELIGIBLE_REPLICA: broker 2 is not live"
    assert refused == f"t-0: the controller refuses ISR (1, 2) in leader epoch 7: {why}"
    assert taken == "t-1: the controller takes ISR (1, 2) in leader epoch 7"


def test_a_follower_says_what_it_cuts_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lone = LonePartition(tmp_path / "t-0")
    elect(0, 1, lone.partition)  # broker 2 is in the ISR, so later appends are not committed
    append(lone.partition, b"a")
    elect(2, 2, lone.partition)
    position = lone.partition.fetch_position()
    assert position is not None
    caplog.set_level(logging.INFO)
    lone.partition.apply(Fetched(position, 2, 0, 0, Diverging(0, 0)), [])
    assert lone.partition.replica.log_end_offset == 0
    (line,) = (record for record in caplog.records if "truncated" in record.getMessage())
    leader = "broker 2, which leads in leader epoch 2, has epoch 0 up to 0"
    assert line.getMessage() == f"t-0: truncated from 1 to 0: {leader}; our log ends at 1 in epoch 1"
    fields = fields_of(line)
    assert (fields["topic_partition"], fields["leader_epoch"]) == ("t-0", 2)
    assert (fields["old_offset"], fields["offset"]) == (1, 0)
    lone.close()


def test_a_line_is_text_for_people_and_json_for_machines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    announce(manager(1), queue(1).take_news())
    (record,) = caplog.records
    text = formatter(TEXT).format(record)
    assert text.endswith(": t-0: asks for ISR (1, 2) in leader epoch 7: broker 3 ends at 120, the leader at 500")
    line = json.loads(formatter(JSON).format(record))
    assert line["level"] == "INFO"
    assert line["message"] == record.getMessage()
    assert {name: line[name] for name in ("topic_partition", "leader_epoch", "isr", "offset")} == {
        "topic_partition": "t-0",
        "leader_epoch": 7,
        "isr": [1, 2],
        "offset": 500,
    }


@pytest.mark.usefixtures("in_tokyo")
def test_a_line_for_people_names_the_zone_of_its_time() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "so", (), None)
    record.created, record.msecs = 1_700_000_000.123, 123.0
    assert formatter(TEXT, "%(asctime)s %(message)s").format(record) == "2023-11-14 22:13:20.123Z so"


def test_a_line_with_a_traceback_and_one_without_fields_are_one_line_of_json_each() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "it failed: %s", ("so",), sys.exc_info())
    text = formatter(JSON).format(record)
    assert "\n" not in text
    assert json.loads(text)["message"] == "it failed: so"
    assert "ValueError" in json.loads(text)["error"]


def test_names_that_clients_give_write_no_lines_of_their_own_in_a_text_log() -> None:
    """Story: the reason in a heartbeat had a line feed. What followed it looked like any other line of the log."""
    forged = "away\n2026-11-28 00:00:00.000Z ERROR 1 spark_broker.broker: forged\x1b[2J\u2028\u202e"
    try:
        raise ValueError("two\nlines")
    except ValueError:
        failed = logging.LogRecord("x", logging.ERROR, "f", 1, "group left: %s", (forged,), sys.exc_info())
    first, *trace = formatter(TEXT, "%(message)s").format(failed).split("\n")
    assert first == r"group left: away\n2026-11-28 00:00:00.000Z ERROR 1 spark_broker.broker: forged\x1b[2J\u2028\u202e"
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[-2:] == ["ValueError: two", "lines"]
    assert json.loads(formatter(JSON).format(failed))["message"] == f"group left: {forged}"


def fields(caplog: pytest.LogCaptureFixture, words: str) -> dict[str, object]:
    """The fields of the only line whose text has these words. The JSON format has them, too."""
    (record,) = (record for record in caplog.records if words in record.getMessage())
    record_fields = fields_of(record)
    assert {*record_fields} <= {*json.loads(formatter(JSON).format(record))}
    assert {"topic_partition", "leader_epoch", "offset"} <= {*record_fields}
    return record_fields


def test_each_change_of_role_is_one_line_and_an_isr_of_the_same_epoch_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lone = LonePartition(tmp_path / "t-0")
    elect(2, 1, lone.partition)
    elect(0, 2, lone.partition)
    elect(0, 2, lone.partition)  # no change
    again = LeaderAndIsr(0, 2, 3, (0, 1, 2), (0, 1, 2))
    lone.partition.assign(again, lone.topic, {0: 1, 1: 1, 2: 1})
    log = "log from 0 to 0, high watermark 0"
    assert lines(caplog) == [
        f"t-0: offline -> leader, leader epoch -1 -> 0, leader 0, ISR (0,), {log}",
        f"t-0: leader -> follower, leader epoch 0 -> 1, leader 2, ISR (2, 2), {log}",
        f"t-0: follower -> leader, leader epoch 1 -> 2, leader 0, ISR (0, 2), {log}",
        "t-0: ISR (0, 2) -> (0, 1, 2) in leader epoch 2, log end 0",
    ]
    changed = fields(caplog, "follower -> leader")
    assert (changed["old_role"], changed["role"], changed["leader"]) == ("follower", "leader", 0)
    lone.close()


def test_a_replica_that_is_stopped_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lone = LonePartition(tmp_path / "t-0")
    caplog.set_level(logging.INFO)
    for _ in range(2):
        lone.partition.stop(UnknownTopicOrPartitionError("t was deleted"))
    assert lines(caplog) == ["t-0: stopped at offset 0 in leader epoch 0: t was deleted"]
    assert fields(caplog, "stopped")["why"] == "t was deleted"
    lone.close()


def test_a_log_that_is_restarted_says_where_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lone = LonePartition(tmp_path / "t-0")
    append(lone.partition, b"a")
    elect(2, 1, lone.partition)
    position = lone.partition.fetch_position()
    assert position is not None
    lone.partition.apply(Fetched(position, 1, 9, 7), [])
    caplog.set_level(logging.INFO)
    lone.partition.restart(1, ReplicaStateResponse(7, [(0, 0)], []))
    why = "the leader's log starts at 7, ours ends at 1"
    assert lines(caplog) == [f"t-0: restarted at 7 in leader epoch 1; the log that ended at 1 is gone: {why}"]
    assert fields(caplog, "restarted")["old_offset"] == 1
    lone.close()


def test_fetches_that_fail_are_a_line_when_it_begins_and_one_when_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lone = LonePartition(tmp_path / "t-0")
    elect(2, 1, lone.partition)
    caplog.set_level(logging.INFO)
    said = lone.partition.lines
    for now_ms in range(5_000, 5_500, 50):
        said.fetch_failed(logging.INFO, now_ms, "broker 2 does not lead")
    said.fetched(5_500)
    said.fetched(5_550)
    assert lines(caplog) == [
        "t-0: fetches from broker 2 begin to fail at 0 in leader epoch 1: broker 2 does not lead",
        "t-0: fetches from broker 2 work again at 0 in leader epoch 1, after 500 ms",
    ]
    assert fields(caplog, "work again")["failed_ms"] == 500
    caplog.clear()
    for now_ms in range(5_600, 5_600 + 10 * FLAPPING_MS, 100):  # fails and works in turn, five times a second
        (said.fetched if now_ms % 200 else lambda at: said.fetch_failed(logging.INFO, at, "again"))(now_ms)
    assert 10 <= len(lines(caplog)) <= 20
    lone.close()


def test_a_connection_to_a_leader_that_breaks_is_a_line_and_its_return_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    said = ConnectionLines("host:9092")
    for now_ms in range(100, 700, 50):
        said.failed(now_ms, "connection refused")
    said.worked(700)
    said.worked(750)
    said.failed(800, "once more, at once")
    assert lines(caplog) == [
        "replication from host:9092 begins to fail: connection refused",
        "replication from host:9092 works again, after 600 ms",
    ]


def test_what_recovery_cuts_is_a_line_of_each_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lone = LonePartition(tmp_path / "t-0")
    append(lone.partition, b"a")
    (index,) = lone.directory.glob("*.index")
    entries = index.stat().st_size
    with index.open("ab") as file:
        file.write(b"half an entry")
    caplog.set_level(logging.INFO)
    lone.reopen(StartKind.PROCESS_CRASH)
    (line,) = (record for record in caplog.records if "recovery" in record.getMessage())
    cut = f"recovery cuts {index.name} from {entries + 13} to {entries} bytes"
    assert line.getMessage() == f"t-0: {cut}"
    assert {"topic_partition": "t-0", "offset": 0, "old_bytes": entries + 13}.items() <= fields_of(line).items()
    lone.close()


def test_a_slow_request_is_a_line_that_stands_for_the_others_of_its_kind(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    slow = SlowLog(lambda: now_s)
    slow.took("append", 0.9, topic_partition="t-0")
    for _ in range(4):
        slow.took("append", 2.5, topic_partition="t-0", leader_epoch=3, offset=7)
    slow.took("fetch", 1.5)
    now_s = 1.0
    slow.took("append", 2.5, topic_partition="t-1", leader_epoch=3, offset=9)
    assert lines(caplog) == [
        "slow: append took 2500 ms, topic partition t-0, leader epoch 3, offset 7",
        "slow: fetch took 1500 ms",
        (
            "slow: append took 2500 ms, topic partition t-1, leader epoch 3, offset 9; "
            "so did 3 others since the last such line"
        ),
    ]
    assert fields(caplog, "t-1")["took_ms"] == 2500


def test_a_slow_call_is_a_line_also_where_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 3.0, 3.0])
    with pytest.raises(NetworkError), SlowLog(lambda: next(times)).watch("call of WriteMarkers", to="broker 2"):
        raise NetworkError("gone")
    assert lines(caplog) == ["slow: call of WriteMarkers took 3000 ms, to broker 2"]


def test_appends_and_fetches_write_no_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lone = LonePartition(tmp_path / "t-0")
    caplog.set_level(logging.INFO)
    for _ in range(20):
        append(lone.partition, b"a")
        lone.partition.reader.read(0, 0, 1 << 20, read_committed=True)
        lone.partition.tick({0: 1})
    assert lines(caplog) == []
    lone.close()
