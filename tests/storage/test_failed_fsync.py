"""Known bug 27: after a failed fsync, what later counts as synced really is, also in the next process."""

from __future__ import annotations

import errno

import pytest

from spark_broker.errors import KafkaStorageError
from spark_broker.storage.start_kind import StartKind
from tests.storage.logs import append_batch, open_log, sim_directory

BATCHES = 4


@pytest.mark.parametrize("synced_first", [0, 2], ids=["nothing synced", "a part synced"])
def test_the_next_process_writes_again_what_a_failed_fsync_dropped(synced_first: int) -> None:
    fs, directory = sim_directory()
    log = open_log(directory, fs=fs)
    for number in range(BATCHES):
        append_batch(log)
        if number + 1 == synced_first:
            log.flush()
    fs.fail_next("fsync", errno.EIO)
    with pytest.raises(KafkaStorageError):
        log.flush()
    end_offset = log.log_end_offset

    fs = fs.crash_process()
    log = open_log(directory, StartKind.PROCESS_CRASH, fs=fs)
    assert log.log_end_offset == end_offset
    log.close(clean=True)

    fs = fs.crash_machine_keeping(0)  # Only what was synced survives.
    log = open_log(directory, StartKind.MACHINE_CRASH, fs=fs)
    assert log.log_end_offset == end_offset
    assert len(log.read(0, max_bytes=1 << 20, end_offset=end_offset)) == BATCHES


def test_the_next_process_writes_an_end_of_stream_mark_again_whose_fsync_failed() -> None:
    """All batches were synced before: only the mark of the roll was lost."""
    fs, directory = sim_directory()
    log = open_log(directory, fs=fs)
    append_batch(log)
    log.close(clean=True)
    log = open_log(directory, fs=fs)
    fs.fail_next("fsync", errno.EIO, path=".arrow")
    with pytest.raises(KafkaStorageError):
        append_batch(log, roll=True)

    fs = fs.crash_process()
    log = open_log(directory, StartKind.PROCESS_CRASH, fs=fs)
    append_batch(log, roll=True)
    log.flush()
    log.close(clean=True)

    log = open_log(directory, StartKind.MACHINE_CRASH, fs=fs.crash_machine_keeping(0))
    assert log.log_end_offset == 6
