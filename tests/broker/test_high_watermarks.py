"""A saved high watermark is never above the end of its log."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_broker.broker.high_watermarks import SavedHighWatermarks
from spark_broker.errors import StorageFullError
from spark_broker.storage.directory import LogDirectory

KEY = ("topic-id", 0)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[LogDirectory]:
    claimed = LogDirectory.claim(tmp_path, cluster_id="c", launch=1)
    yield claimed
    claimed.release()


def test_a_log_that_was_made_shorter_half_way_is_not_opened_with_its_old_mark(directory: LogDirectory) -> None:
    marks = SavedHighWatermarks(directory)
    marks.save(lambda: {KEY: 100}, lambda _: True)
    with pytest.raises(StorageFullError), marks.lowering(KEY, 10):
        raise StorageFullError("full")
    marks.save(lambda: {KEY: 100}, lambda _: True)
    assert directory.read_high_watermarks() == {KEY: 10}
    marks.remember(KEY, 100)
    assert marks.last(KEY) == 10
    assert marks.reached(KEY, 70) == 70, "of the log as it was, and all of it is committed"
    marks.save(lambda: {KEY: 120}, lambda _: True)
    assert directory.read_high_watermarks() == {KEY: 120}, "the log was opened again, and may grow"
    marks.save(lambda: {KEY: 20}, lambda _: True)
    assert marks.reached(KEY, 500) == 20, "what an earlier log had reached says nothing of the open one"
