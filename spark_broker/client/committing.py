"""The commits of a consumer: on request, from time to time, and at its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from spark_broker.client import consumer_errors, given
from spark_broker.client.consumer_machine import ConsumerMachine
from spark_broker.client.consumer_threads import ROUND_TIMEOUT_MS, ConsumerThreads
from spark_broker.client.retry import Deadline
from spark_broker.config import ConsumerConfig
from spark_broker.errors import (
    BootstrapUnreachableError,
    CoordinatorNotAvailableError,
    NetworkError,
    RequestTimedOutError,
    StaleMemberEpochError,
    ThrottlingQuotaExceededError,
    again,
)
from spark_broker.interrupts import uninterrupted
from spark_broker.model import OffsetAndMetadata, TopicPartition, known_epoch

_log = logging.getLogger(__name__)

_NOBODY_TO_COMMIT_TO = (
    BootstrapUnreachableError,
    CoordinatorNotAvailableError,
    NetworkError,
    RequestTimedOutError,
    ThrottlingQuotaExceededError,
)

RENEW_S = 30.0
"""So often an offset is sent again that has not changed. A coordinator forgets offsets of a group without members after
`offsets.retention.minutes`, of which there is one at least.
"""

REASON_S = 0.5
"""A commit that is under way ends within this time after its deadline, and says why. One behind it waits on."""

Offsets = Mapping[TopicPartition, "int | OffsetAndMetadata"]


class Committing:
    """Of one consumer. `check_open` raises ClosedError."""

    def __init__(
        self, machine: ConsumerMachine, threads: ConsumerThreads, config: ConsumerConfig, check_open: Callable[[], None]
    ) -> None:
        self._machine = machine
        self._threads = threads
        self._is_automatic = bool(config.group_id) and config.enable_auto_commit
        self._interval_s = config.auto_commit_interval_ms / 1000
        self._check_open = check_open
        self._automatic_s = self._renewed_s = time.monotonic()

    def commit(self, offsets: Offsets | None, deadline: Deadline) -> None:
        """Under the lock. Commit these offsets, or the positions, and wait for it. See `Consumer.commit`."""
        if offsets is None:
            chosen = self._machine.positions_to_commit()
        else:
            self._await_positions(given.by_partition(offsets), deadline)
            chosen = self._checked(offsets)
        self._await(chosen, deadline)

    def later(self) -> None:
        """Under the lock. Commit the positions that have changed, without waiting for the answer."""
        self._later(self._machine.positions_to_commit())

    def before_assignment(self) -> None:
        """Under the lock. Partitions that a caller has assigned are about to go, perhaps (enable.auto.commit)."""
        if self._is_automatic and not self._machine.is_member:
            self._later(self._machine.positions_to_keep())

    def _later(self, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        self._renew()
        self._machine.commit_later(offsets, Deadline.after_ms(ROUND_TIMEOUT_MS).at_s * 1000)
        self._threads.advance(news=False)

    def last(self, deadline: Deadline) -> bool:
        """Commit what has changed, at the end (enable.auto.commit), and wait for commits that nobody has waited for.
        Whether a coordinator was there: a cluster that is gone already must not keep the caller from closing.
        """
        try:
            with self._threads.lock:
                if self._is_automatic:
                    self._renew()
                    self._await(self._machine.uncommitted_positions(), deadline)
                self._await_others(deadline)
        except _NOBODY_TO_COMMIT_TO as error:
            _log.warning("the last positions could not be committed: %s", error)
            return False
        except (*consumer_errors.MEMBER_IS_GONE, StaleMemberEpochError) as error:
            if not self._machine.is_member:
                raise
            _log.warning("the last positions could not be committed: %s", error)
        return True

    def last_of_assigned(self, deadline: Deadline) -> None:
        """As `last`, where a caller has assigned partitions: before that is over, and the consumer joins its group."""
        if self._machine.partitions and not self._machine.is_member:
            self.last(deadline)

    def _renew(self) -> None:
        if time.monotonic() - self._renewed_s > RENEW_S:
            self._renewed_s = time.monotonic()
            self._machine.renew_commits()

    def when_due(self) -> None:
        """Commit the positions after what earlier polls handed out. What this poll returns is not committed by it."""
        if self.due_in_s() == 0:
            self._automatic_s = time.monotonic()
            with uninterrupted(self._threads.lock):
                self._later(self._machine.positions_to_keep())

    def due_in_s(self) -> float | None:
        """Seconds until the next automatic commit; None: there is none."""
        if not self._is_automatic:
            return None
        return max(self._automatic_s + self._interval_s - time.monotonic(), 0.0)

    def _await_positions(self, partitions: Iterable[TopicPartition], deadline: Deadline) -> None:
        """Under the lock. Whether a commit would pass records is known once the positions are."""
        for tp in partitions:
            while (position := self._machine.partitions.get(tp)) is not None and not position.has_position:
                self._machine.raise_lasting()
                if position.error is not None:
                    break  # It has none, so a commit passes nothing.
                if deadline.expired:
                    raise RequestTimedOutError(f"the position of {tp} could not be looked up in time")
                self._threads.wait(deadline.remaining_s)
                self._check_open()

    def _checked(self, offsets: Offsets) -> dict[TopicPartition, OffsetAndMetadata]:
        """Under the lock. Raises OffsetOutOfRangeError and PolicyViolationError."""
        chosen = {
            tp: offset if offset.leader_epoch is not None else self._with_epoch(tp, offset)
            for tp, offset in given.offsets(offsets).items()
        }
        self._machine.check_commit(chosen)
        return chosen

    def _with_epoch(self, partition: TopicPartition, offset: OffsetAndMetadata) -> OffsetAndMetadata:
        """KAFKA-20507: with the leader epoch of the last record before a committed offset, where it is known."""
        position = self._machine.partitions.get(partition)
        if position is None or position.position != offset.offset:
            return offset
        return OffsetAndMetadata(offset.offset, known_epoch(position.last_epoch), offset.metadata)

    def _await_others(self, deadline: Deadline) -> None:
        """Under the lock. Wait for commits without a caller. Raises the error that the next `poll` would raise."""
        failure = self._machine.failure
        while self._machine.is_committing:
            self._machine.raise_lasting()
            if deadline.expired:
                raise RequestTimedOutError("a commit was not answered in time")
            self._threads.wait(deadline.remaining_s)
            self._check_open()
        if self._machine.failure is not None and self._machine.failure is not failure:
            raise again(self._machine.failure)

    def _await(self, offsets: dict[TopicPartition, OffsetAndMetadata], deadline: Deadline) -> None:
        """Under the lock. Raises the commit's error, also when no coordinator answered."""
        if not offsets:
            return
        commit = self._machine.commit(offsets, deadline.at_s * 1000)
        self._threads.advance()
        limit = Deadline(deadline.at_s + REASON_S)
        while not commit.done:
            self._machine.raise_lasting()
            if limit.expired:
                raise RequestTimedOutError("an earlier commit was not answered in time, so this one was not sent")
            self._threads.wait(limit.remaining_s)
            self._check_open()
        if commit.error is not None:
            raise commit.error
