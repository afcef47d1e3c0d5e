"""Lets a thread wait for the answer of a component that does not block, or have it passed on when it comes."""

from __future__ import annotations

import threading

from spark_broker.broker.reply import Answer, Reply
from spark_broker.errors import RequestTimedOutError, SparkBrokerError, again
from spark_broker.protocol.messages import Message


class AwaitedAnswer:
    """Called with the answer, once, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._answer: Answer | None = None  # guarded by _lock, like _then
        self._then: Reply | None = None

    def __call__(self, answer: Answer) -> None:
        if isinstance(answer, SparkBrokerError):
            answer = again(answer)  # The frames of the one that was raised hold this object.
        with self._lock:
            self._answer, then = answer, self._then
        self._done.set()
        if then is not None:
            then(answer)

    @property
    def has_come(self) -> bool:
        return self._done.is_set()

    def then(self, reply: Reply) -> None:
        """Have this called with the answer: now, or by the thread that brings it."""
        with self._lock:
            answer = self._answer
            if answer is None:
                self._then = reply
                return
        reply(answer)

    def outcome(self, timeout_ms: int) -> Answer:
        """The answer or the error; RequestTimedOutError when there is none in time."""
        if not self._done.wait(max(timeout_ms, 0) / 1000) or self._answer is None:
            return RequestTimedOutError("the broker did not come to an answer in time")
        return self._answer

    def wait(self, timeout_ms: int) -> Message:
        """The answer. Raises the error if that is the outcome."""
        outcome = self.outcome(timeout_ms)
        if isinstance(outcome, SparkBrokerError):
            raise again(outcome)
        return outcome
