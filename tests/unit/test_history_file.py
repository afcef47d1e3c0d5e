"""A saved history is loaded as it was, and a file that is not a history is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_broker.errors import InvalidDataError
from spark_broker.model import TopicPartition
from spark_broker.testing.checker import check_history
from spark_broker.testing.history import Event, Isolation, Stored, TransactionAborted, Truncated, UncleanElection
from spark_broker.testing.history_file import load_history, save_history
from spark_broker.testing.recorder import HistoryRecorder

P0 = TopicPartition("t", 0)


def eventful() -> HistoryRecorder:
    """One event of every kind."""
    recorder = HistoryRecorder()
    recorder.opened("r", isolation=Isolation.READ_UNCOMMITTED, group="g")
    recorder.acknowledged(recorder.invoked("w", P0, [b"a", b"\xff\x00"]), 0)
    transaction = recorder.began("w", transactional_id="x")
    recorder.acknowledged(recorder.invoked("w", P0, [b"c"], transaction), 2)
    recorder.committed(recorder.committing([transaction]))
    attempt = recorder.began("task", app="app", version=3, execution="e")
    recorder.failed(recorder.invoked("task", P0, [b"d"], attempt), ValueError("no"))
    recorder.commit_unknown(recorder.committing([], app="app", version=3), ValueError("timed out"))
    recorder.commit_refused(recorder.committing([attempt]), ValueError("fenced"), already_committed=True)
    recorder.aborted(attempt)
    recorder.assigned("r", [P0], 7)
    recorder.positioned("r", P0, 0)
    recorder.polled("r", P0, 0, [b"a", b"\xff\x00", b"c"])
    recorder.add(Truncated("r", P0, 4))
    recorder.add(UncleanElection(TopicPartition("t", 9)))
    recorder.latest_shown("o", P0, 3)
    recorder.offsets_committed("g", P0, 3, transaction)
    recorder.offsets_committed("g", P0, 3, reader="r", began=recorder.event_count)
    recorder.revoked("r", [P0])
    recorder.assigned("r", [P0, TopicPartition("t", 1)], 8)
    recorder.revoked("r", [P0], lost=True)
    recorder.gone("r")
    recorder.offsets_fetched("g", P0, 3)
    recorder.snapshot_began("df")
    rows = [Stored(P0, 0, b"a"), Stored(P0, 1, b"\xff\x00"), Stored(P0, 2, b"c")]
    recorder.snapshot("df", rows, final=False)
    recorder.snapshot("consumer", rows)
    return recorder


def test_a_history_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    history = eventful().history()
    save_history(history, tmp_path / "h.jsonl")

    loaded = load_history(tmp_path / "h.jsonl")

    assert loaded == history
    assert {type(event) for event in loaded.events} == set(Event.__args__)
    assert TransactionAborted(1) in loaded.events
    assert str(check_history(loaded)) == str(check_history(history))


def test_the_recorder_counts_what_is_promised() -> None:
    assert eventful().acknowledged_values == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "first line"), (b"something\n", "first line"), (b'spark-broker-history-1\n["Nothing"]\n', "line 2")],
)
def test_what_is_not_a_history_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "h.jsonl"
    path.write_bytes(content)

    with pytest.raises(InvalidDataError, match=message):
        load_history(path)
