"""Acknowledgements that a producer does not read: no thread waits for it, and other producers get theirs at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spark_broker.broker.append_stream import UNREAD_MAX, AppendStream
from spark_broker.errors import NotLeaderOrFollowerError
from spark_broker.protocol.messages import AppendResponse, Message


class Stream:
    """Stands in for a `ServerStream` and records how each answer was sent."""

    def __init__(self) -> None:
        self.now: list[Message] = []
        self.posted: list[Message] = []
        self.sending = False

    def send_now(self, message: Message) -> bool:
        if not self.sending:
            self.now.append(message)
        return not self.sending

    def post(self, message: Message, sent: Callable[[], object]) -> None:
        self.posted.append(message)
        sent()


@pytest.fixture
def stream() -> Stream:
    return Stream()


def acknowledge(server: AppendStream, number: int) -> AppendResponse:
    assert server.answers.waiting.acquire(blocking=False)
    answer = AppendResponse(number, 0, "", number)
    server.answers.send(answer)
    return answer


def made(stream: Stream, max_waiting: int = 500) -> AppendStream:
    return AppendStream(None, stream, max_waiting)  # type: ignore[arg-type]


def test_who_reads_nothing_is_answered_by_another_thread_after_a_few(stream: Stream) -> None:
    server = made(stream)
    answers = [acknowledge(server, number) for number in range(UNREAD_MAX + 10)]
    assert stream.now == answers[:UNREAD_MAX]
    assert stream.posted == answers[UNREAD_MAX:]


def test_who_reads_is_answered_at_once_for_ever(stream: Stream) -> None:
    server = made(stream, max_waiting=1)
    for number in range(3 * UNREAD_MAX):
        server.answers.read = number
        acknowledge(server, number)
    assert stream.posted == []


def test_while_another_thread_sends_and_for_errors_which_may_be_large_nobody_waits(stream: Stream) -> None:
    server = made(stream)
    assert server.answers.waiting.acquire(blocking=False)
    server.answers.send(AppendResponse(0, NotLeaderOrFollowerError.code, "x" * 65_000))
    stream.sending = True
    acknowledge(server, 1)
    assert (len(stream.now), len(stream.posted)) == (0, 2)
