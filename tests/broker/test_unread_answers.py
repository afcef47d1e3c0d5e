"""Acknowledgements that a producer does not read: nobody waits for it, and they have a bound."""

from __future__ import annotations

from collections.abc import Callable

from spark_broker.broker.append_stream import AppendStream
from spark_broker.protocol.messages import AppendResponse, Message

MAX_WAITING = 5


class Stream:
    """Stands in for a `ServerStream` whose client reads nothing until it is told to."""

    def __init__(self) -> None:
        self.posted: list[tuple[Message, Callable[[], object]]] = []

    def post(self, message: Message, sent: Callable[[], object]) -> None:
        self.posted.append((message, sent))


def test_whoever_reads_no_answer_has_no_more_appends_than_may_wait_for_theirs() -> None:
    stream = Stream()
    server = AppendStream(None, stream, MAX_WAITING)  # type: ignore[arg-type]
    for number in range(MAX_WAITING):
        assert server.answers.waiting.acquire(blocking=False)
        server.answers.send(AppendResponse(number, 0, "", number))
    assert not server.answers.waiting.acquire(blocking=False)
    stream.posted[0][1]()
    assert server.answers.waiting.acquire(blocking=False)
    assert [message for message, _ in stream.posted] == [AppendResponse(n, 0, "", n) for n in range(MAX_WAITING)]
