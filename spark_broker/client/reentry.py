"""Calls of a client from within its own calls: from a signal handler that interrupted one, or from a done-callback.

An interrupted call may hold the client's locks, and goes on only when the handler returns: who waits for it waits for
ever. A callback runs in the thread that has to report the other outcomes. The stack tells where a call comes from, so
that calls which come from elsewhere pay nothing for the question.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future
from enum import IntEnum
from pathlib import Path
from types import FrameType

from spark_broker.errors import ReentrantCallError

_CLIENT = str(Path(__file__).parent)
_CALLS_BACK = Future._invoke_callbacks.__code__  # type: ignore[attr-defined]

_WAITS_FOR_ALL = "wait_without_lock"
_WAIT_FOR_THAT = frozenset({"drain", "flush", "close", "__exit__"})
"""A producer's functions that hold no lock while they wait."""

_WAITS_WITH_RLOCK = frozenset({"wait", "tell_listener"})
"""A consumer's functions: its state is consistent meanwhile, and the thread may take its lock again."""


class Within(IntEnum):
    """From where a client is called."""

    NOTHING = 0  # from none of its own calls
    WAIT = 1  # a signal handler interrupted a wait that holds no lock
    CALLBACK = 2  # from the callback of a Future, where the client's state is consistent
    CALL = 3  # whatever is interrupted may hold a lock


def within(*parts: object) -> Within:
    """From where the caller, a method of one of these parts of a client, was called."""
    frame = _next_clients(_caller(sys._getframe(1)))
    if frame is None:
        return Within.NOTHING
    found, calls_back = Within.NOTHING, False
    while frame is not None:
        if _is_of(frame, parts):
            chain, frame = _chain(frame, parts)
            found = max(found, _kind(chain, calls_back=calls_back))
            calls_back = False
            continue
        if frame.f_code is _CALLS_BACK:
            calls_back = True
        elif not _is_clients(frame) and frame.f_code.co_filename != _CALLS_BACK.co_filename:
            calls_back = False
        frame = frame.f_back
    return found


def _caller(frame: FrameType | None) -> FrameType | None:
    """The first frame that is not a client's, from here outwards."""
    while frame is not None and frame.f_code.co_filename.startswith(_CLIENT):
        frame = frame.f_back
    return frame


def _next_clients(frame: FrameType | None) -> FrameType | None:
    """The next frame of a client, or of a Future's callbacks. Nearly every call of a client ends here, with None."""
    while frame is not None:
        code = frame.f_code
        if code is _CALLS_BACK or code.co_filename.startswith(_CLIENT):
            return frame
        frame = frame.f_back
    return None


def refuse_within(*parts: object, least: Within = Within.CALL) -> Within:
    """From where the caller was called. Raises ReentrantCallError if it is `least` or worse."""
    place = within(*parts)
    if place >= least:
        raise refusal(place)
    return place


def refusal(place: Within) -> ReentrantCallError:
    """The error of a call that cannot work there."""
    where = "a done-callback" if place is Within.CALLBACK else "a call of this client, which it interrupted"
    return ReentrantCallError(f"called within {where}: it would wait for what goes on only afterwards")


def _chain(frame: FrameType, parts: tuple[object, ...]) -> tuple[list[str], FrameType | None]:
    """The names of the client's functions from here outwards, and the frame that called the first of them."""
    names = []
    outer: FrameType | None = frame
    while outer is not None and _is_clients(outer):
        if _is_of(outer, parts):
            names.append(outer.f_code.co_name)
        outer = outer.f_back
    return names, outer


def _kind(chain: list[str], *, calls_back: bool) -> Within:
    if calls_back:
        return Within.CALLBACK
    waits = chain[0] == _WAITS_FOR_ALL and _WAIT_FOR_THAT.issuperset(chain[1:])
    return Within.WAIT if waits or chain[0] in _WAITS_WITH_RLOCK else Within.CALL


def _is_clients(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_CLIENT)


def _is_of(frame: FrameType, parts: tuple[object, ...]) -> bool:
    """Whether this is a method of one of the parts."""
    if not _is_clients(frame) or not frame.f_code.co_argcount:
        return False
    first = frame.f_locals.get(frame.f_code.co_varnames[0])
    return any(first is part for part in parts)
