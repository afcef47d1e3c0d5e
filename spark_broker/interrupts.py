"""Exceptions out of signal handlers: Ctrl-C, `signal.alarm`. They come between any two steps of the main thread.

What must be done as a whole, or not at all, is in an `uninterrupted` block: handlers are called when the block has
ended. Where it waits, it does so in an `interruptible` block: a handler is called at once there, and what it raises
ends both blocks. Within a wait there may be another whole, and so on. Threads that wait for each other use `Condition`
and `Event` of this module.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes an enum of each number: too slow for each append
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Protocol, Self

_Handler = Callable[[int, FrameType | None], object]

_SIGNALS = tuple(
    int(number)
    for number in (
        *(signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGQUIT),
        *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGVTALRM, signal.SIGPROF),
    )
)
_MAIN = threading.main_thread()


class _Lock(Protocol):
    def acquire(self) -> object: ...
    def release(self) -> None: ...


class _State:
    current: uninterrupted | None = None
    """The outermost block that the main thread is in."""


class uninterrupted:  # noqa: N801  (a context manager)
    """A context manager. It holds the lock, if one is given. In other threads than the main one it does nothing else.

    `raised`: what a handler raised where the block waited.
    """

    __slots__ = (
        "_came",
        "_could_wait",
        "_handlers",
        "_lock",
        "_may_wait",
        "_outermost",
        "_pauses",
        "_raised",
        "_waits",
    )

    def __init__(self, lock: _Lock | None = None) -> None:
        self._lock = lock
        self._handlers: dict[int, _Handler] = {}
        self._came: list[tuple[int, FrameType | None]] = []
        self._may_wait = True
        self._waits = False
        self._raised: BaseException | None = None
        self._outermost: uninterrupted | None = None  # It is within this one.
        self._pauses = False  # It is within a wait of the outermost block, which goes on after this one.
        self._could_wait = True  # whether the outermost block might wait when this one began

    @property
    def raised(self) -> BaseException | None:
        """See the class."""
        return (self._outermost or self)._raised

    def __enter__(self) -> Self:
        if threading.current_thread() is _MAIN:
            outer = _State.current
            if outer is None:
                self._begin()
            else:
                self._outermost, self._pauses, self._could_wait = outer, outer._waits, outer._may_wait
                outer._waits = False
        if self._lock is not None:
            self._lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.release()
        if _State.current is self:
            self._end()
        elif self._outermost is not None:
            self._outermost._may_wait = self._could_wait
            if self._pauses:
                self._outermost._go_on_waiting()

    def wait_no_more(self) -> None:
        """See the function of this name."""
        self._may_wait = False

    def begin_wait(self, *, anew: bool) -> bool:
        """Call handlers at once from now on. Returns False where that is so already, or must not be.

        Once one has raised, the first wait of the way out is not ended, too; `anew`: this one is.
        """
        if self._waits or not self._may_wait:
            return False
        if anew:
            self._raised = None
        self._go_on_waiting()
        return True

    def end_wait(self, error: BaseException | None) -> None:
        """Call handlers at the end of the block again. `error`: what comes out of the wait."""
        self._waits = False
        if error is not self._raised:
            self._raised = None  # Within the wait, it was caught, or became another one.

    def _go_on_waiting(self) -> None:
        self._waits = True
        while self._came and self._raised is None:
            self._call(*self._came.pop(0))

    def _begin(self) -> None:
        try:
            _State.current = self
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self._handle)
        except BaseException:
            self._end()
            raise

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._waits and self._raised is None:
            self._call(number, frame)
        else:
            self._came.append((number, frame))

    def _call(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            self._raised = error
            raise

    def _end(self) -> None:
        """Put every handler back that nobody has replaced, and then call those whose signals came meanwhile.

        A handler may replace itself when it is called: the first Ctrl-C ends in order, the second one at once.
        """
        raised, left = None, list(self._handlers.items())
        while left:
            try:
                while left:
                    number, handler = left[-1]
                    if _signal.getsignal(number) == self._handle:
                        _signal.signal(number, handler)
                    left.pop()
            except BaseException as error:  # noqa: BLE001  (of a handler that is back; it is raised below)
                raised = error
        _State.current = None
        while self._came:
            number, frame = self._came.pop(0)
            try:
                self._handlers[number](number, frame)
            except BaseException:
                for other, _ in self._came:
                    signal.raise_signal(other)  # Its handler is back: Python calls it.
                raise
        if raised is not None:
            raise raised


class interruptible:  # noqa: N801  (a context manager)
    """A context manager: a wait within an `uninterrupted` block. Elsewhere it does nothing.

    `anew`: it can also be ended where a handler has raised before: code of the user's runs in it.
    """

    __slots__ = ("_anew", "_of")

    def __init__(self, *, anew: bool = False) -> None:
        self._anew = anew

    def __enter__(self) -> None:
        block = _State.current if threading.current_thread() is _MAIN else None
        self._of = block if block is not None and block.begin_wait(anew=self._anew) else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._of is not None:
            self._of.end_wait(error)


def wait_no_more() -> None:
    """A part is done, so the rest of this thread's innermost block has to be done, too: handlers are called later."""
    if _State.current is not None and threading.current_thread() is _MAIN:
        _State.current.wait_no_more()


class Condition(threading.Condition):
    """A condition whose lock is held again whenever a signal handler's exception leaves `wait`.

    Take the lock itself, and not the condition: a handler could raise within the condition's own code.
    """

    def wait(self, timeout: float | None = None) -> bool:
        """As that of `threading`; a handler is called while this waits, and neither before nor after."""
        with uninterrupted():
            gate = threading.Lock()
            gate.acquire()
            self._waiters.append(gate)  # type: ignore[attr-defined]
            state = self._release_save()  # type: ignore[attr-defined]
            came = False
            try:
                with interruptible():
                    came = gate.acquire(timeout=-1 if timeout is None else max(timeout, 0))
                return came
            finally:
                self._acquire_restore(state)  # type: ignore[attr-defined]
                if gate in self._waiters:  # type: ignore[attr-defined]
                    self._waiters.remove(gate)  # type: ignore[attr-defined]
                elif not came:  # It was notified, and does not go on by that.
                    self.notify()


class Turn:
    """One thread at a time, as a lock. It is taken in an `uninterrupted` block; the wait for it is interruptible."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = Condition(self._lock)
        self.is_taken = False

    def take(self, timeout: float | None = None) -> bool:
        """Whether it is the caller's within this time (s)."""
        with self._lock:
            if not self._free.wait_for(lambda: not self.is_taken, timeout):
                return False
            self.is_taken = True
            return True

    def give_back(self) -> None:
        """Let the next thread take it."""
        with self._lock:
            self.is_taken = False
            self._free.notify()

    def __enter__(self) -> None:
        self.take()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()


class Event:
    """As that of `threading`. No signal handler's exception leaves its lock held."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # A handler may set it that has interrupted a wait for it.
        self._changed = Condition(self._lock)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Let everybody go on who waits, or will."""
        with uninterrupted(self._lock):
            self._is_set = True
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it was set within this time (s)."""
        with self._lock:
            return self._changed.wait_for(lambda: self._is_set, timeout)


def _forked() -> None:
    """A thread has forked while the main thread was in a block: that thread does not exist in the child."""
    global _MAIN
    here, block = threading.current_thread(), _State.current
    if here is not _MAIN:
        _MAIN, _State.current = here, None
        for number, handler in () if block is None else block._handlers.items():
            _signal.signal(number, handler)


os.register_at_fork(after_in_child=_forked)
