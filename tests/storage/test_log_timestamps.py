"""The running maximum of timestamps after a log was emptied does not count earlier records."""

from __future__ import annotations

from pathlib import Path

from spark_broker.storage.log import PartitionLog
from tests.storage.logs import make_frame, open_log

SECOND_US = 1_000_000


def _log_with_hidden_timestamps(directory: Path) -> PartitionLog:
    """Three segments up to offset 9, all below the log start, with timestamps of 900 s."""
    log = open_log(directory)
    for base_offset in (0, 3, 6):
        log.append_many([make_frame(base_offset, first=True, timestamp_us=900 * SECOND_US)])
    log.advance_log_start(9)
    return log


def test_a_follower_takes_the_first_batch_of_a_leader_that_began_empty_here(tmp_path: Path) -> None:
    """Found by the simulator: such a leader's clock was behind, so its timestamps were lower than in a file here."""
    log = _log_with_hidden_timestamps(tmp_path)
    log.append_many([make_frame(9, first=True, timestamp_us=600 * SECOND_US)])
    assert log.log_end_offset == 12


def test_a_lookup_by_time_is_not_misled_by_what_lies_below_the_log_start(tmp_path: Path) -> None:
    log = _log_with_hidden_timestamps(tmp_path)
    for base_offset, seconds in ((9, 600), (12, 700), (15, 800)):
        log.append_many([make_frame(base_offset, first=True, timestamp_us=seconds * SECOND_US)])
    batches = {seconds: log.offset_for_timestamp(seconds * SECOND_US) for seconds in (500, 600, 650, 700, 750, 850)}
    offsets = {seconds: None if batch is None else batch[0] for seconds, batch in batches.items()}
    assert offsets == {500: 9, 600: 9, 650: 12, 700: 12, 750: 15, 850: None}
