"""Where two logs diverge. The leader and the follower each search their own epoch history."""

from __future__ import annotations

from dataclasses import dataclass

from spark_broker.core.epochs import UNDEFINED_EPOCH, EpochHistory
from spark_broker.errors import LogTruncationError, UnknownLeaderEpochError


@dataclass(frozen=True, slots=True)
class FetchPosition:
    """What a follower's fetch names: the leader epoch it follows, its log end and the epoch of its last batch.

    `no_room`: the last batches sent did not fit on its disk.
    """

    leader_epoch: int
    fetch_offset: int
    last_fetched_epoch: int
    no_room: bool = False


@dataclass(frozen=True, slots=True)
class Diverging:
    """The follower's log is not a prefix of the leader's.

    In the leader's log, `epoch` ends at `end_offset` (exclusive). The follower compares this with its own end of
    `epoch`, and cuts its log at the smaller of both.
    """

    epoch: int
    end_offset: int


def find_divergence(epochs: EpochHistory, log_end_offset: int, position: FetchPosition) -> Diverging | None:
    """Where the follower's log diverges from the leader's, whose history is `epochs`; None if it does not.

    KIP-279: the logs agree below `fetch_offset` exactly when the epoch of the follower's last batch reaches that far in
    the leader's history.
    """
    if position.last_fetched_epoch == UNDEFINED_EPOCH:
        behind = position.fetch_offset <= log_end_offset
        return None if behind else Diverging(UNDEFINED_EPOCH, log_end_offset)
    if position.last_fetched_epoch > epochs.latest_epoch:
        return Diverging(epochs.latest_epoch, log_end_offset)
    end = epochs.end_of(position.last_fetched_epoch, log_end_offset)
    if end.epoch == UNDEFINED_EPOCH:
        # This history begins with a later epoch. The follower's batch is older than the log start or conflicts with it.
        return None if position.fetch_offset <= end.end_offset else Diverging(UNDEFINED_EPOCH, end.end_offset)
    if end.epoch < position.last_fetched_epoch or end.end_offset < position.fetch_offset:
        return Diverging(end.epoch, end.end_offset)
    return None


def check_lineage(epochs: EpochHistory, log_start_offset: int, log_end_offset: int, read: FetchPosition) -> None:
    """KIP-320: check that the leader's log still holds what a consumer has read below `read.fetch_offset`.

    The consumer names the leader epoch of the last record that it read. With -1, nothing is compared. Raises
    LogTruncationError. Raises UnknownLeaderEpochError for an epoch that this leader does not know: the consumer must
    ask a later leader.
    """
    if read.last_fetched_epoch > read.leader_epoch:
        raise UnknownLeaderEpochError(f"the reader has read of epoch {read.last_fetched_epoch}, this leader has not")
    if read.last_fetched_epoch == UNDEFINED_EPOCH or read.fetch_offset <= log_start_offset:
        return
    diverging = find_divergence(epochs, log_end_offset, read)
    if diverging is not None:
        offset = max(log_start_offset, min(diverging.end_offset, read.fetch_offset))
        raise LogTruncationError(
            f"what was read below {read.fetch_offset} is not in the log any more from {offset} on",
            divergent_offset=offset,
            diverging_epoch=diverging.epoch,
        )


def truncation_offset(epochs: EpochHistory, log_end_offset: int, diverging: Diverging) -> int:
    """KIP-279: the smaller of the leader's and the follower's end of the epoch. The next fetch repeats the search."""
    mine = epochs.end_of(diverging.epoch, log_end_offset)
    ends = [diverging.end_offset, log_end_offset]
    if mine.end_offset >= 0:
        ends.append(mine.end_offset)
    return min(ends)
