"""Commits that fail behind the caller's back are told, and none waits for ever."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from spark_broker import Consumer
from spark_broker.errors import ClientEndedError, CoordinatorNotAvailableError, SparkBrokerError, UnknownMemberIdError
from spark_broker.protocol.messages import ErrorResponse, Message, MetadataRequest, OffsetCommitRequest
from tests.client.fake_broker import FakeCluster
from tests.client.test_consumer import T0, Values, poll_rows
from tests.conftest import WaitUntil

WAIT_S = 20.0


class Stop(BaseException):
    """Of a signal handler, as KeyboardInterrupt."""


def refuse_commits(cluster: FakeCluster, error: SparkBrokerError) -> list[Message]:
    """Every commit is answered with the error from now on. Returns what is asked from now on."""
    asked: list[Message] = []

    def answer(broker: int, request: Message) -> Message | None:
        asked.append(request)
        return ErrorResponse(error.code, error.message) if isinstance(request, OffsetCommitRequest) else None

    cluster.call_hook = answer
    return asked


def test_the_refusal_of_a_background_commit_is_raised_by_the_next_poll(
    cluster: FakeCluster, values: Values, wait_until: WaitUntil
) -> None:
    """Story: the metadata that the refusal asks for came first, and the refusal was forgotten."""
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    with Consumer(cluster.bootstrap, group_id="g", auto_offset_reset="earliest", enable_auto_commit=False) as consumer:
        consumer.assign([T0])
        poll_rows(consumer, 1)
        asked = refuse_commits(cluster, UnknownMemberIdError("the group has members"))
        consumer.commit_async()

        def metadata_came() -> bool:
            kinds = [type(request) for request in asked]
            refused = kinds.index(OffsetCommitRequest) if OffsetCommitRequest in kinds else len(kinds)
            return MetadataRequest in kinds[refused:] and consumer._machine._round is None

        wait_until(metadata_came, "the metadata after the refusal")
        with pytest.raises(UnknownMemberIdError):
            consumer.poll(0.0)


def test_a_commit_and_a_close_end_when_the_thread_that_commits_has_died(
    cluster: FakeCluster, values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    consumer = Consumer(cluster.bootstrap, group_id="g", topics=["t"], auto_offset_reset="earliest")
    poll_rows(consumer, 1)

    def out_of_memory(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(consumer._group, "commit", out_of_memory)
    with ThreadPoolExecutor(1) as pool:
        for call in (consumer.commit, consumer.close):
            assert isinstance(pool.submit(call).exception(WAIT_S), ClientEndedError)


def test_a_close_keeps_its_time_behind_a_commit_that_is_under_way(cluster: FakeCluster, values: Values) -> None:
    """Ctrl-C in `commit` while the coordinator is away, and the end of the program."""
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    consumer = Consumer(
        cluster.bootstrap, group_id="g", topics=["t"], auto_offset_reset="earliest", default_api_timeout_ms=60_000
    )
    poll_rows(consumer, 1)
    refuse_commits(cluster, CoordinatorNotAvailableError("it loads"))

    def stop(*_: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(Stop):
            consumer.commit()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    began_s = time.monotonic()
    consumer.close(timeout=0.5)
    assert time.monotonic() - began_s < WAIT_S
