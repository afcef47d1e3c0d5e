"""What a partition remembers of its producers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.core.batch import NO_PRODUCER, BatchInfo
from spark_broker.core.producers import (
    REMEMBERED_BATCHES,
    SEQUENCE_LIMIT,
    ProducerEntry,
    ProducerStates,
    StoredBatch,
)
from spark_broker.errors import (
    DuplicateSequenceNumberError,
    InvalidProducerEpochError,
    OutOfOrderSequenceNumberError,
    UnknownProducerIdError,
)

PID = 7


def stored(sequence: int, offset: int, *, producer_id: int = PID, epoch: int = 0) -> BatchInfo:
    """A batch of one row."""
    return BatchInfo(offset, offset + 1, 0, 0, producer_id, epoch, sequence)


def states_after(count: int, *, first: int = 0, epoch: int = 0) -> ProducerStates:
    """`count` batches of one row, numbered from `first` on."""
    states, sequence = ProducerStates(), first
    for offset in range(count):
        states.replay(stored(sequence, offset, epoch=epoch))
        sequence = (sequence + 1) % SEQUENCE_LIMIT
    return states


@given(st.integers(1, 12), st.sampled_from([0, 5, SEQUENCE_LIMIT - 6, SEQUENCE_LIMIT - 1]), st.integers(-15, 15))
def test_a_number_is_next_or_a_retry_or_refused(count: int, first: int, distance: int) -> None:
    """`distance` counts from the last stored number, also across the wrap-around."""
    states = states_after(count, first=first)
    sequence = (first + count - 1 + distance) % SEQUENCE_LIMIT
    if distance == 1:
        assert states.check(PID, 0, sequence) is None
    elif distance > 1:
        with pytest.raises(OutOfOrderSequenceNumberError):
            states.check(PID, 0, sequence)
    elif -distance < min(count, REMEMBERED_BATCHES):
        offset = count - 1 + distance
        assert states.check(PID, 0, sequence) == StoredBatch(sequence, offset, offset)
    else:
        with pytest.raises(DuplicateSequenceNumberError):
            states.check(PID, 0, sequence)


def test_sequence_numbers_wrap_to_zero() -> None:
    states = states_after(1, first=SEQUENCE_LIMIT - 1)
    assert states.check(PID, 0, 0) is None
    states.replay(stored(0, 1))
    assert states.check(PID, 0, SEQUENCE_LIMIT - 1) == StoredBatch(SEQUENCE_LIMIT - 1, 0, 0)


def test_a_producer_begins_at_zero_in_each_of_its_epochs() -> None:
    """Known bugs 20 and 24: an unknown producer at another number is refused, and so is an older epoch."""
    states = states_after(3, epoch=4)
    with pytest.raises(UnknownProducerIdError):
        states.check(8, 0, 1)
    assert states.check(8, 0, 0) is None
    with pytest.raises(OutOfOrderSequenceNumberError):
        states.check(PID, 5, 3)
    assert states.check(PID, 5, 0) is None
    with pytest.raises(InvalidProducerEpochError):
        states.check(PID, 3, 0)


def test_a_later_epoch_forgets_the_batches_of_the_earlier_one() -> None:
    """Known bug 23: its number 0 is the new batch, not the earlier epoch's."""
    states = states_after(3)
    states.replay(stored(0, 9, epoch=1))
    assert states.check(PID, 1, 0) == StoredBatch(0, 9, 9)
    with pytest.raises(OutOfOrderSequenceNumberError):
        states.check(PID, 1, 2)


def test_five_batches_are_remembered_oldest_first() -> None:
    ((producer_id, entry),) = states_after(8).entries()
    assert producer_id == PID
    assert [batch.sequence for batch in entry.batches] == [3, 4, 5, 6, 7]


def test_a_copy_does_not_follow_the_original_and_equality_is_by_content() -> None:
    states = states_after(2)
    copy = states.copy()
    assert copy == states == ProducerStates(states.entries())
    states.replay(stored(2, 2))
    assert copy != states


def test_batches_without_a_producer_leave_nothing() -> None:
    states = ProducerStates()
    states.replay(stored(-1, 0, producer_id=NO_PRODUCER, epoch=-1))
    assert states.entries() == []


def test_entries_are_sorted_by_producer() -> None:
    entry = ProducerEntry(0, (StoredBatch(0, 0, 0),), 0)
    assert [pid for pid, _ in ProducerStates([(9, entry), (2, entry)]).entries()] == [2, 9]


def test_a_batch_that_the_log_start_cuts_through_is_remembered_once() -> None:
    """The snapshot at a log start inside a batch has that batch; a follower that lost it copies it whole again."""
    states = states_after(2)
    before = states.copy()
    states.replay(stored(1, 1))
    assert states == before
    assert states.check(PID, 0, 0) == StoredBatch(0, 0, 0)
