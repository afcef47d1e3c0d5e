"""Room for answers to calls: a call is begun only when there is some, for its connection and for the whole server.

Nobody knows how large an answer becomes: a request of 20 bytes may ask for all metadata. So a call counts as
`MAKING_BYTES` from its beginning, and as its answer's size from when that is known until the peer's system has it. A
call that has begun never waits for room: it can always finish.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from spark_broker.transport.byte_budget import ByteBudget

MAKING_BYTES = 4 << 20
"""What an answer counts as while it is being made."""

MAKING_MAX = 4
"""Answers of one connection that are being made at a time. Python runs one thread at a time, too."""

UNTAKEN_MAX_BYTES = 1 << 20
"""No more calls of a connection are begun while it leaves more than this of its answers."""

MAKING_S = 1.0
"""A call without an answer after so long waits for something else. It counts as one whose answer is small: a handler
that waits keeps no other call waiting for longer."""


class CallRoom:
    """What one call takes. Safe from any thread."""

    __slots__ = ("_answers", "bytes", "ended", "since_s")

    def __init__(self, answers: ConnectionAnswers) -> None:
        self._answers = answers
        # Guarded by the lock of `_answers`.
        self.bytes = MAKING_BYTES
        self.ended = False
        self.since_s = time.monotonic()

    def is_small(self) -> None:
        """The answer will be small: the call counts as nothing until it is made."""
        self._answers.lend(self, counts=False)

    def lend(self) -> None:
        """The call waits for others. It counts as nothing meanwhile, but among those of its connection."""
        self._answers.lend(self, counts=True)

    def made(self, size: int) -> None:
        """The answer has so many bytes, which are there already. Does nothing after `end`."""
        self._answers.made(self, size)

    def end(self) -> bool:
        """The peer's system has the answer, or there is none. Returns False if the call has ended before."""
        return self._answers.end(self)


class ConnectionAnswers:
    """What the calls of one connection take of the server's room.

    Invariants, under `_lock`: `_making` are the calls whose answer is being made, and may be large. `_untaken` is the
    sum of the `bytes` of those whose answer is made. `_refused` is set while a call waits for others of its connection.
    """

    def __init__(self, budget: ByteBudget, there_is_room: Callable[[], object]) -> None:
        """`there_is_room` is called, from any thread, when a call that was refused may begin."""
        self.budget = budget
        self._there_is_room = there_is_room
        self._lock = threading.Lock()
        self._making: dict[CallRoom, None] = {}
        self._untaken = 0
        self._refused = False

    @property
    def untaken_bytes(self) -> int:
        """Of answers that are made, and that the peer's system does not have."""
        return self._untaken

    def close(self) -> None:
        """Nothing waits any more. Without a reference to who waited, both are freed without a collection."""
        self._there_is_room = _nothing

    def begin(self, who: object) -> CallRoom | None:
        """Room for a call. None: `there_is_room` will be called. Others may wait behind `who` in the budget."""
        if self._has_too_much() and self._is_refused():
            self.budget.forget(who)  # Nobody else waits for what is up to this connection alone.
            return None
        if not self.budget.reserve(MAKING_BYTES, who, self._there_is_room):
            return None
        room = CallRoom(self)
        with self._lock:
            self._making[room] = None
        return room

    def _has_too_much(self) -> bool:
        return len(self._making) >= MAKING_MAX or self._untaken > UNTAKEN_MAX_BYTES

    def _is_refused(self) -> bool:
        """Under the lock nothing ends in between: whoever ends last sees that a call is refused."""
        with self._lock:
            self._refused = self._has_too_much()
            return self._refused

    def lend(self, room: CallRoom, *, counts: bool) -> None:
        """Used by `CallRoom`. Does nothing if the answer is made."""
        with self._lock:
            if room not in self._making:
                return
            more, room.bytes = -room.bytes, 0
            if not counts:
                del self._making[room]
        self._changed(more)

    def made(self, room: CallRoom, size: int) -> None:
        """Used by `CallRoom`."""
        with self._lock:
            more = 0 if room.ended else self._set(room, size)
        self._changed(more)

    def end(self, room: CallRoom) -> bool:
        """Used by `CallRoom`."""
        with self._lock:
            if room.ended:
                return False
            room.ended = True
            more = self._set(room, 0)
        self._changed(more)
        return True

    def _set(self, room: CallRoom, size: int) -> int:
        """Returns how many bytes more are held. Under the lock."""
        more = size - room.bytes
        if room in self._making:
            del self._making[room]
            self._untaken += size
        else:
            self._untaken += more
        room.bytes = size
        return more

    def _changed(self, more: int) -> None:
        if more:
            self.budget.change(more)
        if self._refused and self._goes_on():
            self._there_is_room()

    def _goes_on(self) -> bool:
        """Whether a call that was refused may begin now. Returns True once.

        At half of the bounds: a peer that sends small calls without a pause is not read once for each.
        """
        with self._lock:
            before = self._refused
            if len(self._making) <= MAKING_MAX // 2 and self._untaken <= UNTAKEN_MAX_BYTES // 2:
                self._refused = False
            return before != self._refused

    def look(self, now_s: float) -> None:
        """Keep nobody waiting for calls that have taken too long."""
        with self._lock:
            old = [room for room in self._making if now_s - room.since_s > MAKING_S]
        for room in old:
            room.is_small()


def _nothing() -> None:
    """For a connection that is closed."""


_handled = threading.local()


def handling(room: CallRoom | None) -> None:
    """This thread works on a call from now on; None: on none."""
    _handled.room = room


def expect_small_answer() -> None:
    """For handlers: the answer to the call that this thread works on will be small, however long it takes. Other calls
    need not wait for it. Does nothing in a thread that works on no call."""
    if (room := _room()) is not None:
        room.is_small()


def lend_room() -> None:
    """For handlers: this thread waits for others before its call is answered. Calls of other connections need not wait
    for it. Does nothing in a thread that works on no call."""
    if (room := _room()) is not None:
        room.lend()


def _room() -> CallRoom | None:
    room: CallRoom | None = getattr(_handled, "room", None)
    return room
