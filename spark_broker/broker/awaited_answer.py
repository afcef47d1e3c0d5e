"""Lets a thread wait for the answer of a component that does not block."""

from __future__ import annotations

import threading

from spark_broker.errors import RequestTimedOutError, SparkBrokerError
from spark_broker.protocol.messages import Message


class AwaitedAnswer:
    """Called with the answer, once, from any thread."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._answer: Message | SparkBrokerError | None = None

    def __call__(self, answer: Message | SparkBrokerError) -> None:
        self._answer = answer
        self._done.set()

    def outcome(self, timeout_ms: int) -> Message | SparkBrokerError:
        """The answer or the error; RequestTimedOutError when there is none in time."""
        if not self._done.wait(max(timeout_ms, 0) / 1000) or self._answer is None:
            return RequestTimedOutError("the broker did not come to an answer in time")
        return self._answer

    def wait(self, timeout_ms: int) -> Message:
        """The answer. Raises the error if that is the outcome."""
        outcome = self.outcome(timeout_ms)
        if isinstance(outcome, SparkBrokerError):
            raise outcome
        return outcome
