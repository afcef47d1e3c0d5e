"""Deadlines, exponential backoff with jitter, and the loop that retries what may be retried."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from spark_broker.errors import (
    BootstrapUnreachableError,
    ClosedError,
    RequestTimedOutError,
    SparkBrokerError,
    UnknownTopicOrPartitionError,
)
from spark_broker.threads import LONGEST_WAIT_S

T = TypeVar("T")
Item = TypeVar("Item")

JITTER = 0.2
"""Waits differ by this share. Otherwise all clients that lost a broker would come back at the same moment."""

UNKNOWN_TOPIC_GRACE_MS = 1000
"""A broker may learn of a new topic later than the client. So a topic counts as absent only when it has been so for
this time.
"""

SHORT_ROUND_MS = 1000
"""A broker that has not answered in this time may still be well. So a round that the deadline cuts to less says nothing
of the broker.
"""

FAST_RETRIES = 20
"""The first looks at the metadata of a partition without a leader come at the first back-off. An election takes less
than a second, and the time until a client notices it is part of the fail-over.
"""


class Closing(Protocol):
    """An event: the client is being closed."""

    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None, /) -> bool: ...


class Deadline:
    """A moment on the monotonic clock."""

    __slots__ = ("at_s",)

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    @classmethod
    def after_ms(cls, timeout_ms: float) -> Deadline:
        return cls(time.monotonic() + timeout_ms / 1000)

    @property
    def remaining_s(self) -> float:
        return min(max(0.0, self.at_s - time.monotonic()), LONGEST_WAIT_S)

    @property
    def remaining_ms(self) -> int:
        """Rounded up: what is given this time, and does not end in it, ends after the deadline."""
        return math.ceil(self.remaining_s * 1000)

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.at_s

    def or_sooner(self, other: Deadline) -> Deadline:
        """The one of both that comes first."""
        return other if other.at_s < self.at_s else self


class TopicGrace:
    """Which errors one call retries: the retriable ones. The absence of a topic is retried only until it is certain."""

    def __init__(self) -> None:
        self._absence_believed: Deadline | None = None  # It begins with the first answer: one may take longer.

    def retries(self, error: SparkBrokerError) -> bool:
        """Whether the call may go on after the error."""
        if isinstance(error, UnknownTopicOrPartitionError):
            self._absence_believed = self._absence_believed or Deadline.after_ms(UNKNOWN_TOPIC_GRACE_MS)
            return not self._absence_believed.expired
        return error.retriable


class Backoff:
    """Waits of `base_ms`, doubling up to `max_ms`, each with jitter."""

    def __init__(self, base_ms: int, max_ms: int, *, rng: random.Random | None = None) -> None:
        self._base_ms = base_ms
        self._max_ms = max(base_ms, max_ms)
        self._rng = rng if rng is not None else random.Random()

    def wait_s(self, attempt: int) -> float:
        """Seconds to wait after failed attempt number `attempt`, counted from 0."""
        wait_ms = min(self._max_ms, self._base_ms << min(attempt, 30))
        return wait_ms * self._rng.uniform(1 - JITTER, 1 + JITTER) / 1000


class RecoveryPace:
    """Which attempt a back-off counts, over rounds of recovery that follow one another.

    The first `fast` rounds of a recovery count as the first attempt. A recovery that has ended counts for nothing. So a
    client is as quick at its hundredth fail-over as at its first.
    """

    def __init__(self, fast: int = FAST_RETRIES) -> None:
        self._fast = fast
        self._rounds = 0

    def after_round(self, *, recovered: bool) -> int:
        """The attempt to count for the pause after a round."""
        self._rounds = 0 if recovered else self._rounds + 1
        return max(0, self._rounds - self._fast)


class Tries:
    """When the next round of one kind may begin. A recovery that has ended does not slow down the next one."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._pace = RecoveryPace()
        self.next_ms = 0.0

    def ended(self, now_ms: float, *, recovered: bool) -> None:
        attempt = self._pace.after_round(recovered=recovered)
        self.next_ms = 0.0 if recovered else now_ms + self._backoff.wait_s(attempt) * 1000


class Rounds:
    """The rounds of one call that is tried until its deadline: the waits between them, and what its end is put down to.

    The last round may have only milliseconds. That nobody answered in them is no reason: what went wrong before is.
    """

    def __init__(self, deadline: Deadline, backoff: Backoff, closing: Closing) -> None:
        self._deadline = deadline
        self._backoff = backoff
        self._closing = closing
        self._number = 0
        self._is_short = False

    def next(self) -> bool:
        """Wait until the next round may begin. False: the deadline leaves no time for one. Raises ClosedError."""
        wait_s = self._backoff.wait_s(self._number)
        if wait_s > self._deadline.remaining_s:
            return False
        self._number += 1
        if self._closing.wait(wait_s):
            raise ClosedError("the client was closed during the call")
        self._is_short = self._deadline.remaining_s * 1000 < SHORT_ROUND_MS
        return True

    def reason(self, error: SparkBrokerError, earlier: SparkBrokerError | None) -> SparkBrokerError:
        """What a failure of this round is put down to: itself, or the failure of the round before."""
        cut_short = self._is_short and isinstance(error, RequestTimedOutError)
        return earlier if cut_short and earlier is not None else error


def call_with_retries(
    attempt: Callable[[], T],
    *,
    deadline: Deadline,
    backoff: Backoff,
    closing: Closing,
    retry: Callable[[SparkBrokerError], bool] = lambda error: error.retriable,
    between: Callable[[SparkBrokerError], None] = lambda error: None,
) -> T:
    """The first result of `attempt` that is not a retriable error.

    Raises the last error of `attempt` that has a reason (see `Rounds`) once the deadline has passed, any error that
    `retry` refuses at once, and ClosedError when `closing` is set during a wait. `between` runs before each new attempt
    (a metadata refresh) and gets the error of the last one. It is part of the attempt: its errors are treated in the
    same way.
    """
    rounds = Rounds(deadline, backoff, closing)
    failure: SparkBrokerError | None = None
    while True:
        if closing.is_set():
            raise ClosedError("the client was closed during the call")
        try:
            if failure is not None:
                between(failure)
            return attempt()
        except SparkBrokerError as error:
            if not retry(error):
                raise
            failure = rounds.reason(error, failure)
            if not rounds.next():
                raise failure from None if failure is error else error


def failure_of(change: Callable[[Item], None], item: Item) -> SparkBrokerError | None:
    """Why one change of several has failed; None: it has not. Raises what will fail the others, too: ClosedError,
    BootstrapUnreachableError.
    """
    try:
        change(item)
    except (ClosedError, BootstrapUnreachableError):
        raise
    except SparkBrokerError as error:
        return error
    return None
