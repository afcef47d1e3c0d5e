"""Exceptions out of signal handlers: Ctrl-C, `signal.alarm`. They come between any two steps of the main thread.

What must be done as a whole, or not at all, is in an `uninterrupted` block: handlers are called when the block has
ended. Where it waits, it does so in an `interruptible` block: a handler is called at once there, and what it raises
ends both blocks.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes an enum of each number: too slow for each append
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

_Handler = Callable[[int, FrameType | None], object]

_SIGNALS = tuple(
    int(number)
    for number in (
        *(signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGQUIT),
        *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGVTALRM, signal.SIGPROF),
    )
)
_MAIN = threading.main_thread()


class _State:
    current: uninterrupted | None = None
    """The outermost block that the main thread is in."""


class uninterrupted:  # noqa: N801  (a context manager)
    """A context manager. It does nothing in other threads than the main one, and within another such block.

    `raised`: what a handler raised where the block waited.
    """

    __slots__ = ("_came", "_handlers", "_may_wait", "_waits", "raised")

    def __init__(self) -> None:
        self._handlers: dict[int, _Handler] = {}
        self._came: list[tuple[int, FrameType | None]] = []
        self._may_wait = True
        self._waits = False
        self.raised: BaseException | None = None

    def __enter__(self) -> Self:
        if _State.current is None and threading.current_thread() is _MAIN:
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _State.current is self:
            self._end()

    def wait_no_more(self) -> None:
        """See the function of this name."""
        self._may_wait = False

    def begin_wait(self) -> bool:
        """Call handlers at once from now on. Returns False where that is so already, or must not be."""
        if self._waits or not self._may_wait:
            return False
        self._waits = True
        came, self._came = self._came, []
        for number, frame in came:
            self._call(number, frame)
        return True

    def end_wait(self) -> None:
        """Call handlers at the end of the block again."""
        self._waits = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._waits and self.raised is None:
            self._call(number, frame)
        else:
            self._came.append((number, frame))

    def _call(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            self.raised = error
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
        for number, frame in self._came:
            self._handlers[number](number, frame)
        if raised is not None:
            raise raised


class interruptible:  # noqa: N801  (a context manager)
    """A context manager: a wait within an `uninterrupted` block. Elsewhere it does nothing."""

    __slots__ = ("_of",)

    def __enter__(self) -> None:
        block = _State.current if threading.current_thread() is _MAIN else None
        self._of = block if block is not None and block.begin_wait() else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._of is not None:
            self._of.end_wait()


def wait_no_more() -> None:
    """A part is done, so the rest of this thread's block has to be done, too: handlers are called at its end only."""
    if _State.current is not None and threading.current_thread() is _MAIN:
        _State.current.wait_no_more()
