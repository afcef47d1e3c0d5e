"""An exception that nobody expects, under a lock whose state it may have left half changed."""

from __future__ import annotations

import threading

import pytest

from spark_broker.broker.compaction import AbandonedError
from spark_broker.broker.state_lock import StateLock
from spark_broker.errors import InvariantError, KafkaStorageError


def test_a_change_that_fails_half_way_is_a_broken_invariant() -> None:
    lock = StateLock()
    with pytest.raises(InvariantError, match=r"TypeError\('half'\)") as broken, lock, lock:
        raise TypeError("half")
    assert isinstance(broken.value.__cause__, TypeError)
    assert is_free(lock)


@pytest.mark.parametrize(
    "error",
    [KafkaStorageError("full"), InvariantError("broken"), AbandonedError("stopped"), KeyboardInterrupt()],
)
def test_what_code_under_a_lock_means_to_raise_stays_what_it_is(error: BaseException) -> None:
    lock = StateLock()
    with pytest.raises(type(error)) as raised, lock:
        raise error
    assert raised.value is error
    assert is_free(lock)


def test_a_read_that_fails_has_changed_nothing() -> None:
    lock = StateLock()
    with pytest.raises(TypeError), lock.reading:
        raise TypeError("read")
    assert is_free(lock)


def is_free(lock: StateLock) -> bool:
    """Whether another thread gets it."""
    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(lock.reading.acquire(timeout=5)))
    thread.start()
    thread.join()
    return got == [True]
