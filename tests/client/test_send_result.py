"""What `send` returns is a Future in every respect, though it has no fields of its own until a thread waits."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait

import pytest

from spark_broker.client.send_result import FutureRecordMetadata, SendResult
from spark_broker.client.unseen import Unseen
from spark_broker.errors import MessageTooLargeError, SparkBrokerError
from spark_broker.model import RecordMetadata

WAIT_S = 30.0
STORED = RecordMetadata("t", 1, 100, 3)
FAILED = MessageTooLargeError("too large")


def batch_of_three() -> tuple[SendResult, list[FutureRecordMetadata]]:
    batch = SendResult(Unseen())
    return batch, [FutureRecordMetadata(batch, index) for index in range(3)]


def in_thread(run: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(run()), daemon=True)
    thread.start()
    return thread, results


def test_each_record_has_its_offset_in_the_batch() -> None:
    batch, records = batch_of_three()
    assert [(record.done(), record.running()) for record in records] == [(False, True)] * 3
    batch.complete(STORED)
    assert [record.result() for record in records] == [RecordMetadata("t", 1, offset, 1) for offset in (100, 101, 102)]
    assert [(record.done(), record.running(), record.exception(), record.cancelled()) for record in records] == [
        (True, False, None, False)
    ] * 3


def test_records_of_a_batch_without_offsets_have_none() -> None:
    batch, records = batch_of_three()
    batch.complete(RecordMetadata("t", 1, None, 3))
    assert {record.result().offset for record in records} == {None}


def test_each_record_of_a_batch_that_failed_has_its_error() -> None:
    batch, records = batch_of_three()
    batch.complete(FAILED)
    for record in records:
        assert record.exception() is FAILED
        with pytest.raises(MessageTooLargeError):
            record.result()


def test_a_record_that_nobody_waits_for_has_no_lock_of_its_own() -> None:
    batch, (first, *_) = batch_of_three()
    batch.complete(STORED)
    assert first.done()
    assert first.result().offset == 100
    assert not first.has_fields


def test_a_record_cannot_be_cancelled() -> None:
    batch, (first, *_) = batch_of_three()
    assert not first.cancel()
    batch.complete(STORED)
    assert first.result(0).offset == 100


def test_a_wait_that_is_too_short_times_out() -> None:
    _, (first, *_) = batch_of_three()
    with pytest.raises(TimeoutError):
        first.result(0)
    with pytest.raises(TimeoutError):
        first.exception(0)


@pytest.mark.parametrize("outcome", [STORED, FAILED])
def test_a_thread_that_waits_is_told(outcome: RecordMetadata | SparkBrokerError) -> None:
    batch, (_, second, _) = batch_of_three()
    thread, results = in_thread(lambda: second.exception(WAIT_S))
    thread.join(0.05)  # long enough for it to wait in most runs; the result must be right in all of them
    batch.complete(outcome)
    thread.join(WAIT_S)
    assert results == [outcome if isinstance(outcome, SparkBrokerError) else None]


def test_wait_and_as_completed_take_records_before_and_after_their_outcome() -> None:
    batch, records = batch_of_three()
    other, late = batch_of_three()
    assert wait([*records, *late], timeout=0).done == set()
    thread, results = in_thread(lambda: wait([*records, *late], WAIT_S))
    first, firsts = in_thread(lambda: wait([*records, *late], WAIT_S, return_when=FIRST_COMPLETED).done)
    batch.complete(STORED)
    first.join(WAIT_S)
    assert firsts
    assert not firsts[0] & set(late)  # type: ignore[operator]
    other.complete(FAILED)
    thread.join(WAIT_S)
    assert results == [({*records, *late}, set())]
    assert {*as_completed([*records, *late], timeout=0)} == {*records, *late}
    assert [record.result().offset for record in records] == [100, 101, 102]


def test_a_record_can_be_awaited_by_asyncio() -> None:
    batch, (_, second, _) = batch_of_three()

    async def offset() -> int | None:
        future = asyncio.wrap_future(second)
        await asyncio.to_thread(batch.complete, STORED)
        return (await future).offset

    assert asyncio.run(offset()) == 101


def test_callbacks_run_in_the_order_of_the_records() -> None:
    batch, records = batch_of_three()
    called: list[tuple[str, int | None]] = []

    def note(name: str) -> Callable[[Future[RecordMetadata]], None]:
        return lambda future: called.append((name, future.result(0).offset))

    for record in reversed(records):
        record.add_done_callback(note("first"))
    assert wait(records[:1], timeout=0).not_done == {records[0]}, "it has a lock of its own now, and keeps its callback"
    for record in records:
        record.add_done_callback(note("second"))
    assert called == []
    batch.complete(STORED)
    assert called == [(name, offset) for offset in (100, 101, 102) for name in ("first", "second")]
    records[0].add_done_callback(note("late"))
    assert called[6:] == [("late", 100)]


def test_a_callback_that_raises_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    batch, records = batch_of_three()
    called: list[Future[RecordMetadata]] = []

    def fail(future: Future[RecordMetadata]) -> None:
        raise ValueError("a bug of the user")

    with caplog.at_level(logging.ERROR, logger="concurrent.futures"):
        for record in records:
            record.add_done_callback(fail)
            record.add_done_callback(called.append)
        batch.complete(FAILED)
    assert called == records
    assert [log_record.name for log_record in caplog.records] == ["concurrent.futures"] * 3


def test_a_callback_may_look_at_its_record_as_a_future() -> None:
    """It gets its fields while its callbacks run. They are not run again, and it is not completed again."""
    batch, records = batch_of_three()
    called: list[Future[RecordMetadata]] = []

    def look(future: Future[RecordMetadata]) -> None:
        called.append(future)
        assert wait(records, timeout=0).done == set(records)

    for record in records:
        record.add_done_callback(look)
    batch.complete(STORED)
    assert called == records
    assert "returned RecordMetadata" in repr(records[0])


def test_threads_that_look_while_the_batch_completes_all_see_its_outcome() -> None:
    for _ in range(200):
        batch, records = batch_of_three()
        called: list[Future[RecordMetadata]] = []
        barrier = threading.Barrier(4)

        def look(
            barrier: threading.Barrier = barrier,
            records: list[FutureRecordMetadata] = records,
            called: list[Future[RecordMetadata]] = called,
        ) -> set[Future[RecordMetadata]]:
            barrier.wait(WAIT_S)
            for record in records:
                record.add_done_callback(called.append)
            return wait(records, WAIT_S).done

        threads = [in_thread(look) for _ in range(3)]
        barrier.wait(WAIT_S)
        batch.complete(STORED)
        for thread, _ in threads:
            thread.join(WAIT_S)
        assert [results for _, results in threads] == [[set(records)]] * 3
        assert sorted(called, key=id) == sorted([*records] * 3, key=id)
