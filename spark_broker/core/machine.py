"""What every pure machine does around an event: it checks its state before and after, and remembers what happened last.

A method that is an `@event` first calls `check`, which says where the machine stands; so it does afterwards, and
`check_step` compares the two. An InvariantError that is raised in between, by whomever, says whose it is, in which
state, and after which events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import count
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from spark_broker.errors import InvariantError, SparkBrokerError

EVENTS_KEPT = 16
"""So many of the last events are kept, and of those that moved the machine: hours of appends hide no election."""

QUIET = frozenset({"tick", "expire_producers"})
"""Frequent events. Only those that have effects are remembered."""

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
M = TypeVar("M", bound="Machine[Any]")


class LastEvents:
    """The last events of one machine, oldest first. Bounded; texts are made only when somebody reads them."""

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

    `S` says where it stands: what never falls, and what a reader of its last events wants to know. It is made twice
    for each event, so it is small.
    """

    remembered: frozenset[type] = frozenset({int, bool, str, type(None)})
    """Types of arguments that are kept as they are; of others only the type is, and of sequences the length: a token
    leads to a client's stream, and batches to their bytes."""

    def __init__(self, whose: str) -> None:
        self.whose = whose
        self.last_events = LastEvents()

    def invariant(self, condition: bool, message: str, *values: object) -> None:
        """As `errors.invariant`, for shells: outside of an event, too, the error says whose it is."""
        if not condition:
            self._tell(error := InvariantError(message % values if values else message))
            raise error

    def _tell(self, error: InvariantError) -> None:
        error.concerning(self.whose, self.describe_state(), self.last_events.lines())

    def check(self) -> S:
        """Raises InvariantError where the state contradicts itself; else says where the machine stands."""
        raise NotImplementedError

    def check_step(self, name: str, before: S, after: S) -> bool:
        """Raises InvariantError where the event may not lead from one to the other; else whether the machine moved."""
        raise NotImplementedError

    def describe_state(self) -> str:
        """The whole state in a line."""
        raise NotImplementedError

    def remember(self, name: str, arguments: Sequence[object], outcome: object, *, moved: bool = False) -> None:
        """Add to the last events what may be kept of this one."""
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
