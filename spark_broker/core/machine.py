"""What every pure machine does around an event: it checks its state before and after, and remembers what happened last.

A method that is an `@event` calls `check` before and after it runs. `check` says where the machine stands, and
`check_step` compares the two. An InvariantError that is raised in between names the machine, its state and its last
events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import count
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from spark_broker.errors import InvariantError, SparkBrokerError

EVENTS_KEPT = 16
"""This many of the last events are kept, and this many of those that moved the machine. So an election is still there
after hours of appends."""

QUIET = frozenset({"tick", "expire_producers"})
"""Frequent events. Only those that have effects are remembered."""

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
M = TypeVar("M", bound="Machine[Any]")


class LastEvents:
    """The last events of one machine, oldest first. Their number is bounded. Texts are made only when they are read."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._recent: deque[tuple[int, str, Sequence[object], object]] = deque(maxlen=EVENTS_KEPT)
        self._moves: deque[tuple[int, str, Sequence[object], object]] = deque(maxlen=EVENTS_KEPT)

    def add(self, name: str, arguments: Sequence[object], outcome: object, *, moved: bool = False) -> None:
        """`outcome`: where the machine stands now, or the error that it refused the event with."""
        event = (next(self._numbers), name, arguments, outcome)
        self._recent.append(event)
        if moved:
            self._moves.append(event)

    def lines(self) -> list[str]:
        """`number name(arguments) -> outcome`, in order."""
        events = {event[0]: event for event in (*self._moves, *self._recent)}
        return [
            f"{number} {name}({', '.join(map(str, arguments))}) -> {outcome}"
            for number, (_, name, arguments, outcome) in sorted(events.items())
        ]


class Machine(Generic[S]):
    """A state machine whose events are checked. `whose`: its name, for people.

    `S` says where the machine stands: the values that never fall, and those that a reader of its last events needs. An
    `S` is made twice for each event, so it is small.
    """

    remembered: frozenset[type] = frozenset({int, bool, str, type(None)})
    """Types of arguments that are kept as they are. Of other arguments only the type is kept, and of sequences the
    length: a token would keep a client's stream in memory, and a batch its bytes."""

    def __init__(self, whose: str) -> None:
        self.whose = whose
        self.last_events = LastEvents()

    def invariant(self, condition: bool, message: str, *values: object) -> None:
        """Like `errors.invariant`, for shells. The error names the machine, even outside of an event."""
        if not condition:
            self._tell(error := InvariantError(message % values if values else message))
            raise error

    def _tell(self, error: InvariantError) -> None:
        error.concerning(self.whose, self.describe_state(), self.last_events.lines())

    def check(self) -> S:
        """Where the machine stands. Raises InvariantError if the state contradicts itself."""
        raise NotImplementedError

    def check_step(self, name: str, before: S, after: S) -> bool:
        """Whether the machine moved. Raises InvariantError if the event may not lead from `before` to `after`."""
        raise NotImplementedError

    def describe_state(self) -> str:
        """The whole state in a line."""
        raise NotImplementedError

    def remember(self, name: str, arguments: Sequence[object], outcome: object, *, moved: bool = False) -> None:
        """Add to the last events what may be kept of this one."""
        kept = arguments
        if not self.remembered.issuperset(map(type, arguments)):
            kept = [value if type(value) in self.remembered else self._kept(value) for value in arguments]
        self.last_events.add(name, kept, outcome, moved=moved)

    def _kept(self, value: object) -> object:
        kind = type(value)
        return f"{len(value)} of {kind.__name__}" if isinstance(value, list | tuple) else kind.__name__


def event(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Check the machine before and after, and remember the event."""
    name = method.__name__
    quiet = name in QUIET

    @wraps(method)
    def checked(machine: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            before = machine.check()
            result = method(machine, *args, **kwargs)
            after = machine.check()
            moved = machine.check_step(name, before, after)
        except InvariantError as error:
            machine.remember(name, args, "an invariant broke")
            machine._tell(error)
            raise
        except SparkBrokerError as error:
            machine.remember(name, args, type(error).__name__)
            raise
        if moved or result or not quiet:
            machine.remember(name, args, after, moved=moved)
        return result

    return checked
