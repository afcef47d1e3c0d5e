"""`spark-broker check-history`: judges a saved history as the run that saved it did."""

from __future__ import annotations

from pathlib import Path

from spark_broker.model import TopicPartition
from spark_broker.testing.history import Stored
from spark_broker.testing.history_file import save_history
from spark_broker.testing.recorder import HistoryRecorder
from tests.cli.conftest import Run

P0 = TopicPartition("t", 0)


def saved(path: Path, *, found: list[bytes]) -> Path:
    """Two values acknowledged, and a whole read that found these."""
    recorder = HistoryRecorder()
    recorder.acknowledged(recorder.invoked("alice", P0, [b"a", b"b"]), 0)
    recorder.snapshot("consumer", [Stored(P0, at, value) for at, value in enumerate(found)])
    save_history(recorder.history(), path)
    return path


def test_a_clean_history_is_clean(tmp_path: Path, run: Run) -> None:
    ended = run("check-history", saved(tmp_path / "h.jsonl", found=[b"a", b"b"]))

    assert ended.status == 0
    assert "0 violations; 2 values acknowledged" in ended.out


def test_an_anomaly_is_explained_and_the_status_says_so(tmp_path: Path, run: Run) -> None:
    path = saved(tmp_path / "h.jsonl", found=[b"a"])

    ended = run("check-history", path)
    assert ended.status == 1
    assert "LOST at t-0, offset 1: b'b'" in ended.out
    assert "alice began operation 0" in ended.out

    (violation,) = run("check-history", path, "-o", "json").json["violations"]
    assert (violation["kind"], violation["partition"], violation["offset"]) == ("LOST", 0, 1)


def test_what_is_no_history_is_refused_with_a_reason(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text("nothing\n")

    ended = run("check-history", path)
    assert ended.status != 0
    assert "is not a history" in ended.err
