"""The epoch history against a naive model: a list that names the epoch of every single offset."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from spark_broker.core.divergence import Diverging, FetchPosition, find_divergence, truncation_offset
from spark_broker.core.epochs import UNDEFINED_EPOCH, EpochEnd, EpochHistory, EpochStart
from spark_broker.errors import InvariantError

Log = list[int]
"""The epoch of every offset from 0 on; epochs never fall."""

logs = st.lists(st.integers(0, 6), max_size=20).map(sorted)
epochs = st.integers(-1, 8)


def history_of(log: Sequence[int]) -> EpochHistory:
    """The history that a replica builds, batch by batch."""
    history = EpochHistory()
    for offset, epoch in enumerate(log):
        if epoch != history.latest_epoch:
            history = history.assign(epoch, offset)
    return history


@given(logs)
def test_every_offset_has_the_epoch_that_wrote_it(log: Log) -> None:
    history = history_of(log)
    assert [history.epoch_at(offset) for offset in range(len(log))] == log
    assert history.epoch_at(-1) == UNDEFINED_EPOCH
    assert history.latest_epoch == (log[-1] if log else UNDEFINED_EPOCH)
    assert EpochHistory.from_pairs(history.to_pairs()) == history


@given(logs, epochs)
def test_an_epoch_ends_where_a_later_one_begins(log: Log, epoch: int) -> None:
    end = history_of(log).end_of(epoch, len(log))
    prefix = [e for e in log if e <= epoch]
    if not log or not 0 <= epoch <= log[-1]:
        assert end == EpochEnd(-1, -1)
    elif not prefix:
        assert end == EpochEnd(-1, 0)
    else:
        assert end == EpochEnd(prefix[-1], len(prefix))


@given(logs, st.integers(0, 25))
def test_truncation_is_the_history_of_the_shorter_log(log: Log, end_offset: int) -> None:
    assert history_of(log).truncate_to(end_offset) == history_of(log[:end_offset])


@given(logs, st.integers(0, 20))
def test_a_later_log_start_forgets_epochs_but_no_offset_and_not_the_one_before(log: Log, start: int) -> None:
    start = min(start, len(log))
    history = history_of(log)
    later = history.start_at(start)
    known_from = max(start - 1, 0)
    assert [later.epoch_at(offset) for offset in range(known_from, len(log))] == log[known_from:]
    assert later.latest_epoch == history.latest_epoch
    assert len(later.entries) == len(set(log[known_from:]))


@given(logs, st.integers(0, 3))
def test_a_leader_that_wrote_nothing_leaves_one_entry_at_the_log_end(log: Log, elections: int) -> None:
    history = history_of(log)
    for n in range(elections):
        history = history.assign(10 + n, len(log))
    expected = history_of(log).entries + ((EpochStart(9 + elections, len(log)),) if elections else ())
    assert history.entries == expected
    assert history.truncate_to(len(log)) == history_of(log)


def completed(saved: EpochHistory, log: Log) -> EpochHistory:
    """The history that a replica builds from an older file and its batches when it opens its log (`ReplicaLog`)."""
    history = saved.truncate_to(len(log))
    if log and log[-1] > history.latest_epoch:
        known_to = history.entries[-1].start_offset if history.entries else 0
        for offset in range(known_to, len(log)):
            if log[offset] > history.latest_epoch:
                history = history.assign(log[offset], offset)
    return history


def grown(log: Log, epochs: Log) -> Log:
    """The log with more offsets. Epochs never fall."""
    return log + [log[-1] + epoch if log else epoch for epoch in epochs]


@given(logs, st.integers(0, 20), logs, logs)
@example([0] * 15 + [1], 15, [], [0])  # A leader of epoch 1 followed a leader with more of epoch 0.
@example([0] * 15 + [1], 13, [0, 0], [0])  # The cut-off end of epoch 0 was written again, up to where 1 began.
def test_a_file_that_only_lacks_the_newest_epochs_is_completed_from_the_batches(
    saved: Log, cut: int, then: Log, later: Log
) -> None:
    """The file is of one log. The log was cut, and grew before and after the question. It may have got batches of older
    epochs than those that were cut off: a follower copies what its leader has."""
    kept = saved[:cut]
    now = grown(kept, then)
    whole = grown(now, later)
    # An epoch has one leader, and one log before it. If both logs have a record of it, they agree up to that record.
    shared = [o for o, (old, new) in enumerate(zip(saved, whole, strict=False)) if old == new]
    assume(all(saved[:o] == whole[:o] for o in shared))
    file = history_of(saved)
    if file.only_lacks_the_newest_of(history_of(now), len(now)):
        assert completed(file, whole) == history_of(whole)


@given(logs, logs)
def test_a_file_of_a_log_that_only_grew_lacks_nothing_but_the_newest_epochs(saved: Log, then: Log) -> None:
    """An election needs no sync of the file, nor does what the new leader writes."""
    now = saved + [epoch + 10 for epoch in then]
    elected = history_of(now).assign(30, len(now))
    assert history_of(saved).only_lacks_the_newest_of(elected, len(now))


def test_a_file_that_names_what_was_cut_off_is_wrong() -> None:
    """Otherwise records that are appended there in epoch 7 would be taken for records of epoch 5."""
    file = EpochHistory.from_pairs([(0, 0), (5, 10)])
    assert not file.only_lacks_the_newest_of(EpochHistory.from_pairs([(0, 0)]), 12)  # about to be cut to 8
    assert not file.only_lacks_the_newest_of(EpochHistory.from_pairs([(0, 0)]), 8)
    assert file.only_lacks_the_newest_of(EpochHistory.from_pairs([(0, 0), (6, 10)]), 10)  # epoch 5 wrote nothing


def test_a_file_that_names_an_epoch_at_the_log_end_is_wrong_once_older_batches_may_follow() -> None:
    """A leader of epoch 1 wrote nothing. Then it followed a leader that had more of epoch 0. After a restart these
    batches counted as epoch 1, and the follower cut them off, although they were committed."""
    file = EpochHistory.from_pairs([(0, 0), (1, 15)])
    assert not file.only_lacks_the_newest_of(EpochHistory.from_pairs([(0, 0)]), 15)
    assert file.only_lacks_the_newest_of(file, 15)
    assert file.only_lacks_the_newest_of(EpochHistory.from_pairs([(0, 0), (2, 15)]), 15)


def test_an_epoch_assigned_again_changes_nothing_and_an_older_one_is_our_own_bug() -> None:
    history = EpochHistory.from_pairs([(1, 0), (3, 5)])
    assert history.assign(3, 9) is history
    with pytest.raises(InvariantError):
        history.assign(2, 9)


def reconciled(leader: Log, follower: Log, leader_epoch: int) -> tuple[Log, int]:
    """The follower's log once the leader finds no divergence, and how many rounds that took."""
    theirs = history_of(leader).assign(leader_epoch, len(leader))
    for rounds in range(len(follower) + 2):
        mine = history_of(follower)
        position = FetchPosition(leader_epoch, len(follower), mine.epoch_at(len(follower) - 1))
        diverging = find_divergence(theirs, len(leader), position)
        if diverging is None:
            return follower, rounds
        follower = follower[: truncation_offset(mine, len(follower), diverging)]
    raise AssertionError("truncation does not come to an end")


def common_prefix(one: Log, other: Log) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@st.composite
def diverged_logs(draw: st.DrawFn) -> tuple[Log, Log]:
    """A common past; then each led in epochs of its own, without knowing of the other."""
    past = draw(st.lists(st.integers(0, 2), max_size=6).map(sorted))
    even = draw(st.lists(st.integers(2, 6).map(lambda n: 2 * n), max_size=8).map(sorted))
    odd = draw(st.lists(st.integers(2, 6).map(lambda n: 2 * n + 1), max_size=8).map(sorted))
    # One of them may have written more in the last epoch that both know.
    more = [past[-1]] * draw(st.integers(0, 3)) if past else []
    return (past + more + even, past + odd) if draw(st.booleans()) else (past + odd, past + more + even)


@given(diverged_logs())
def test_whatever_the_shape_the_follower_ends_at_the_common_prefix(both: tuple[Log, Log]) -> None:
    """Known bugs 1 and 2: records that both have are kept, and records that differ are truncated."""
    leader, follower = both
    result, rounds = reconciled(leader, follower, leader_epoch=20)
    assert result == follower[: common_prefix(leader, follower)]
    assert rounds <= len(set(leader) | set(follower)) + 1


def test_the_cut_is_the_smaller_of_both_ends_of_the_epoch() -> None:
    """Known bug 2, KIP-279: the leader's end lies past the follower's log end, so by itself it would cut nothing."""
    leader, follower = [0] * 10 + [2] * 2, [0] * 4 + [1] * 4 + [3] * 2
    theirs, mine = history_of(leader), history_of(follower)
    diverging = find_divergence(theirs, len(leader), FetchPosition(4, 10, 3))
    assert diverging == Diverging(2, 12)
    assert truncation_offset(mine, len(follower), diverging) == 8
    assert reconciled(leader, follower, 4)[0] == [0] * 4


def test_a_log_that_ends_where_another_begins_is_known_to_be_another_one() -> None:
    """Simulator, seeds 407036, 434780: the follower's log was never committed. The leader's starts at its end."""
    leader = EpochHistory.from_pairs([(0, 0), (1, 1)]).start_at(3)
    assert find_divergence(leader, 3, FetchPosition(2, 3, 0)) == Diverging(-1, 1)
    assert find_divergence(leader, 3, FetchPosition(2, 3, 1)) is None
    follower = EpochHistory.from_pairs([(1, 0)]).start_at(3)
    assert find_divergence(leader, 9, FetchPosition(2, 3, follower.epoch_at(2))) is None


@pytest.mark.parametrize(
    ("position", "diverging"),
    [
        (FetchPosition(9, 50, 4), None),  # ends where the leader's log begins
        (FetchPosition(9, 40, 4), None),  # ends before: it will be rebuilt
        (FetchPosition(9, 55, 4), Diverging(-1, 50)),  # its older epoch reaches into what a later one wrote here
        (FetchPosition(9, 0, -1), None),
        (FetchPosition(9, 70, -1), Diverging(-1, 60)),
        (FetchPosition(9, 60, 5), None),
        (FetchPosition(9, 61, 5), Diverging(5, 60)),
        (FetchPosition(9, 60, 7), Diverging(5, 60)),
    ],
)
def test_a_leader_whose_history_begins_later_answers_by_what_it_knows(
    position: FetchPosition, diverging: Diverging | None
) -> None:
    assert find_divergence(EpochHistory.from_pairs([(5, 50)]), 60, position) == diverging
