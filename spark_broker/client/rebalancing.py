"""The caller's part in a rebalance: commit, tell the listener, give up and take up partitions; at the end, leave.

All of it runs in the thread that polls, between two records: what was handed out before, the caller has done with. What
a signal handler raises comes out of the waits and of the listener only: the callers hold an `uninterrupted` block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from spark_broker.client.consumer_machine import ConsumerMachine
from spark_broker.client.consumer_threads import LEAVE_WAIT_S, ConsumerThreads
from spark_broker.client.group_reading import Change, ChangeKind, GroupReading
from spark_broker.client.membership import MemberPhase
from spark_broker.client.rebalance_listener import RebalanceListener
from spark_broker.client.retry import Deadline
from spark_broker.config import ConsumerConfig
from spark_broker.errors import InvariantError, ReentrantCallError
from spark_broker.interrupts import interruptible

_log = logging.getLogger(__name__)

NOTE_S = 0.05
"""A poll is noted for max.poll.interval.ms at most this often: records come a million a second."""


class Rebalancing:
    """Of one consumer. `telling`: the listener is being called."""

    def __init__(
        self, machine: ConsumerMachine, threads: ConsumerThreads, config: ConsumerConfig, check_open: Callable[[], None]
    ) -> None:
        self.listener = RebalanceListener()
        self.telling = False
        self._noted_s = 0.0  # when the last poll was noted
        self._machine = machine
        self._threads = threads
        self._config = config
        self._check_open = check_open
        self._carried_out_by: int | None = None  # the thread that carries a change out, by its ident

    def listen(self, listener: RebalanceListener) -> None:
        """From now on, this is told."""
        self.listener = listener
        self._group.has_listener = True

    @property
    def is_due(self) -> bool:
        """Whether there is something to carry out before the next record."""
        group = self._machine.group
        return group is not None and group.is_changing

    def comes_first(self) -> bool:
        """Under the lock, before each record: whether partitions come or go first. The caller has polled by this, which
        is noted from time to time. A process that stood still for long notices it here.
        """
        now_s = time.monotonic()
        if now_s - self._noted_s > NOTE_S:
            self._noted_s = now_s
            self._machine.polling(now_s * 1000)
            self._machine.polled(now_s * 1000)
        return self.is_due

    def wait(self, timeout_s: float) -> None:
        """Under the lock. Wait for records, or for a change. However long that takes, the caller polls."""
        self._machine.polling(self._threads.now_ms())
        try:
            self._threads.wait(timeout_s)
        finally:
            self._machine.polling(self._threads.now_ms())
            self._machine.polled(self._threads.now_ms())

    def refuse_while_telling(self) -> None:
        """Raises ReentrantCallError in a call of the listener."""
        if self.telling:
            raise ReentrantCallError("called by the consumer's RebalanceListener, for which the call would wait")

    def go_on(self, deadline: Deadline) -> bool:
        """Carry out what the group has decided. False: a commit was not answered by the deadline; go on later.

        Raises what the listener raises, and ClosedError.
        """
        while self.is_due:
            with self._threads.lock:
                self._machine.raise_lasting()
                change = self._group.next_change()
                if change is not None and change.kind is ChangeKind.REVOKED and not self._prepare(change, deadline):
                    return False
                if change is None or not self._group.still_holds(change):
                    continue
                if change.kind is ChangeKind.ASSIGNED:
                    self._changed(change)  # Without the lock, the group could decide otherwise before.
                self._carried_out_by = threading.get_ident()
            self._carry_out(change)
        return True

    def _carry_out(self, change: Change) -> None:
        try:
            _log.info("partitions of group %s are %s: %s", self._config.group_id, change.kind.value, _shown(change))
            self._tell_and_change(change)
        finally:
            with self._threads.lock:
                self._carried_out_by = None
                self._threads.changed.notify_all()

    def _tell_and_change(self, change: Change) -> None:
        if change.kind is ChangeKind.ASSIGNED:
            self.tell_listener(change)
            return
        try:
            self.tell_listener(change)
        finally:
            with self._threads.lock:
                self._changed(change)

    def _await_other_thread(self, deadline: Deadline) -> None:
        """`close` may come from another thread than `poll`. The listener has heard of each partition once, then."""
        with self._threads.lock:
            while self._carried_out_by not in (None, threading.get_ident()) and not deadline.expired:
                self._threads.wait(deadline.remaining_s)

    def _changed(self, change: Change) -> None:
        """Under the lock."""
        self._group.carried_out(change, self._threads.now_ms())
        self._machine.reading_changed()
        self._threads.advance()

    def tell_listener(self, change: Change) -> None:
        """Without the lock: heartbeats go on. The listener may call the consumer, as a signal handler may in a wait."""
        if not change.partitions:
            return
        self.telling = True
        try:
            with interruptible(anew=True):
                match change.kind:
                    case ChangeKind.ASSIGNED:
                        self.listener.on_assigned(list(change.partitions))
                    case ChangeKind.REVOKED:
                        self.listener.on_revoked(list(change.partitions))
                    case ChangeKind.LOST:
                        self.listener.on_lost(list(change.partitions))
        finally:
            self.telling = False

    def _prepare(self, change: Change, deadline: Deadline) -> bool:
        """Under the lock. False: what must be committed before is not yet, at the deadline."""
        limit_ms = min(self._config.default_api_timeout_ms, self._config.max_poll_interval_ms)
        while not self._machine.prepare(change, self._threads.now_ms() + limit_ms):
            self._threads.advance(news=False)
            if deadline.expired:
                return False
            self._threads.wait(deadline.remaining_s)
            self._check_open()
        return True

    def leave(self, deadline: Deadline, reason: str, commit_last: Callable[[], bool]) -> None:
        """Give everything up and leave the group. `commit_last`: whether a coordinator was there.

        Raises what the listener raises.
        """
        self._await_other_thread(deadline)
        membership = self._group.membership
        if membership.phase not in (MemberPhase.IN, MemberPhase.LOST):
            return
        is_lost = membership.phase is MemberPhase.LOST
        answers = is_lost
        try:
            answers = is_lost or commit_last()
        finally:
            self._give_all_up(deadline if answers else Deadline.after_ms(0), reason, is_lost=is_lost)

    def _give_all_up(self, deadline: Deadline, reason: str, *, is_lost: bool) -> None:
        with self._threads.lock:
            change = self._group.next_change() if is_lost else self._group.everything()
        try:
            if change is not None:
                self.tell_listener(change)
        finally:
            membership, limit = self._group.membership, Deadline.after_ms(LEAVE_WAIT_S * 1000)
            with self._threads.lock:
                self._group.left(self._threads.now_ms(), reason)
                self._machine.reading_changed()
                self._threads.advance()
                while membership.is_leaving and not (limit.expired or deadline.expired):
                    self._threads.wait(min(limit.remaining_s, deadline.remaining_s))
                membership.abandon()

    def await_first(self, deadline: Deadline) -> None:
        """A member learns of its first partitions also outside of `poll`. Raises why the group refuses it."""
        membership = self._group.membership
        while self._machine.is_member and not membership.assigned and not deadline.expired:
            with self._threads.lock:
                self._machine.raise_error()
                if not self.is_due:
                    self._threads.wait(deadline.remaining_s)
                    self._check_open()
            self.go_on(deadline)

    @property
    def _group(self) -> GroupReading:
        if self._machine.group is None:
            raise InvariantError("a rebalance of a consumer without a group")
        return self._machine.group


def _shown(change: Change) -> str:
    names = [str(tp) for tp in change.partitions[:10]]
    more = len(change.partitions) - len(names)
    return (", ".join(names) or "none") + (f", and {more} more" if more > 0 else "")
