"""Patterns of topic names, matched in time that grows with the name and not with the pattern's ambiguity.

A user's pattern runs in the coordinator, so it must not be able to stop it. Python's `re` tries alternatives one after
the other, which takes exponential time for some patterns. This is Thompson's construction: an automaton whose possible
states are followed all at once. Its size is bounded before it is built, and the sets of states that were seen are kept
(bounded), so a name costs about one look-up for each character.

The syntax is a subset of RE2's. A pattern matches a whole name:

    x \\. \\-            a character; `\\` before a character that is neither a letter nor a digit takes it literally
    .                  any character
    [a-z_] [^0-9]      a class of characters
    \\d \\w \\s \\D \\W \\S  digits, letters with digits and `_`, white space (ASCII), and their opposites
    xy  x|y  (x) (?:x) one after the other, one of both, a group
    x* x+ x? x{2} x{2,} x{2,4}   repetition, at most 100 times where it is counted
    ^...$              allowed around the whole pattern, where it changes nothing

All else is refused: back-references, look-around, flags, named groups, lazy and possessive repetition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NoReturn

from spark_broker.errors import InvalidRegularExpressionError

LENGTH_MAX = 256
STATES_MAX = 500
REPEAT_MAX = 100
DEPTH_MAX = 30
CACHED_SETS_MAX = 2000
PATTERNS_CACHED = 256

CLASSES = {
    "d": (("0", "9"),),
    "w": (("a", "z"), ("A", "Z"), ("0", "9"), ("_", "_")),
    "s": ((" ", " "), ("\t", "\r")),
}

MISPLACED = {
    **dict.fromkeys("*+?{", "nothing is before a repetition"),
    **dict.fromkeys("^$", "an anchor within it; a pattern always matches a whole name"),
    **dict.fromkeys("]}", "a bracket without its beginning"),
}
"""What no part of a pattern begins with."""


@dataclass(frozen=True, slots=True)
class Characters:
    """A class of characters: inclusive ranges, or all others."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool = False

    def has(self, character: str) -> bool:
        return any(first <= character <= last for first, last in self.ranges) is not self.negated


ANY = Characters((), negated=True)


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other. Without parts: the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of these."""

    choices: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """At least `least` times, at most `most` times (None: any number)."""

    node: Node
    least: int
    most: int | None


Node = Characters | Sequence | Either | Repeat


class _Parser:
    """Recursive descent over one pattern. `depth` of groups is bounded, so the recursion is."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.text = pattern.removeprefix("^")
        if self.text.endswith("$") and not _is_escaped(self.text, len(self.text) - 1):
            self.text = self.text[:-1]
        self.at = 0
        self.depth = 0

    def refuse(self, why: str) -> NoReturn:
        raise InvalidRegularExpressionError(f"the pattern {self.pattern!r} is refused: {why}")

    def parse(self) -> Node:
        node = self.either()
        if self.at < len(self.text):
            self.refuse(f"a {self.text[self.at]!r} without its beginning")
        return node

    def peek(self) -> str:
        """The next character; empty at the end."""
        return self.text[self.at : self.at + 1]

    def take(self) -> str:
        if self.at >= len(self.text):
            self.refuse("it ends too soon")
        self.at += 1
        return self.text[self.at - 1]

    def either(self) -> Node:
        choices = [self.sequence()]
        while self.peek() == "|":
            self.take()
            choices.append(self.sequence())
        return choices[0] if len(choices) == 1 else Either(tuple(choices))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.repeated(self.atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def repeated(self, node: Node) -> Node:
        match self.peek():
            case "*":
                least, most = 0, None
            case "+":
                least, most = 1, None
            case "?":
                least, most = 0, 1
            case "{":
                least, most = self.counts()
            case _:
                return node
        self.take()
        if self.peek() in ("*", "+", "?", "{"):
            self.refuse("a repetition of a repetition (lazy and possessive ones are not known)")
        return Repeat(node, least, most)

    def counts(self) -> tuple[int, int | None]:
        """Of `{m}`, `{m,}` or `{m,n}`. The closing brace is left."""
        self.take()
        end = self.text.find("}", self.at)
        least_text, comma, most_text = self.text[self.at : end].partition(",")
        if end < 0 or not least_text.isdecimal() or not (most_text.isdecimal() or not most_text):
            self.refuse("braces need counts: {2}, {2,} or {2,4}; a brace itself is \\{")
        if len(least_text) > 3 or len(most_text) > 3:
            self.refuse(f"at most {REPEAT_MAX} repetitions are counted")
        least = int(least_text)
        most = (int(most_text) if most_text else None) if comma else least
        if most is not None and most < least:
            self.refuse(f"{{{least},{most}}} has its bounds in the wrong order")
        if max(least, most or 0) > REPEAT_MAX:
            self.refuse(f"at most {REPEAT_MAX} repetitions are counted")
        self.at = end
        return least, most

    def atom(self) -> Node:
        character = self.take()
        if character in MISPLACED:
            self.refuse(MISPLACED[character])
        match character:
            case "(":
                return self.group()
            case "[":
                return self.characters()
            case ".":
                return ANY
            case "\\":
                return self.escape()
            case _:
                return Characters(((character, character),))

    def group(self) -> Node:
        if self.peek() == "?":
            self.take()
            if self.take() != ":":
                self.refuse("only (...) and (?:...) are groups")
        self.depth += 1
        if self.depth > DEPTH_MAX:
            self.refuse(f"groups are more than {DEPTH_MAX} deep")
        node = self.either()
        if self.peek() != ")":
            self.refuse("a group does not end")
        self.take()
        self.depth -= 1
        return node

    def escape(self) -> Characters:
        """After a backslash."""
        character = self.take()
        if character.lower() in CLASSES:
            return Characters(CLASSES[character.lower()], negated=character.isupper())
        if character.isalnum():
            self.refuse(f"\\{character} is not known (there are no back-references)")
        return Characters(((character, character),))

    def characters(self) -> Characters:
        """After an opening bracket."""
        negated = self.peek() == "^"
        if negated:
            self.take()
        ranges: list[tuple[str, str]] = []
        while self.peek() != "]" or not ranges:
            first = self.member()
            ranges += first.ranges
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.take()
                last = self.member()
                low, high = first.ranges[0][0], last.ranges[-1][1]
                if len(first.ranges) > 1 or len(last.ranges) > 1 or low != first.ranges[0][1] or low > high:
                    self.refuse("a range in a class needs two characters in their order")
                ranges.append((low, high))
        self.take()
        return Characters(tuple(ranges), negated)

    def member(self) -> Characters:
        """One character, or one class, within brackets."""
        character = self.take()
        if character == "[":
            self.refuse("a '[' within a class is \\[")
        if character != "\\":
            return Characters(((character, character),))
        escaped = self.escape()
        if escaped.negated:
            self.refuse("an opposite class within a class")
        return escaped


def _is_escaped(text: str, at: int) -> bool:
    before = text[:at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


@dataclass(slots=True)
class _States:
    """The automaton. State 0 is the end. A state either reads a character, or leads on without one."""

    pattern: str
    reads: list[Characters | None] = field(default_factory=lambda: [None])
    leads: list[tuple[int, ...]] = field(default_factory=lambda: [()])

    def add(self, reads: Characters | None, *leads: int) -> int:
        if len(self.reads) >= STATES_MAX:
            raise InvalidRegularExpressionError(
                f"the pattern {self.pattern!r} is refused: it has more than {STATES_MAX:,} states; repeat less"
            )
        self.reads.append(reads)
        self.leads.append(leads)
        return len(self.reads) - 1

    def build(self, node: Node, then: int) -> int:
        """The state from which `node` is read, and then what follows from `then`. Each call adds a state at least."""
        match node:
            case Characters():
                return self.add(node, then)
            case Sequence(parts):
                for part in reversed(parts):
                    then = self.build(part, then)
                return self.add(None, then)
            case Either(choices):
                return self.add(None, *(self.build(choice, then) for choice in choices))
            case Repeat(repeated, least, most):
                if most is None:
                    again = self.add(None)
                    self.leads[again] = (self.build(repeated, again), then)
                    first = again
                else:
                    first = self.add(None, then)
                    for _ in range(most - least):
                        first = self.add(None, self.build(repeated, first), then)
                for _ in range(least):
                    first = self.build(repeated, first)
                return first


class Pattern:
    """A compiled pattern."""

    def __init__(self, text: str) -> None:
        """Raises InvalidRegularExpressionError for a pattern that is empty, too large, or beyond the syntax."""
        if not 0 < len(text) <= LENGTH_MAX:
            raise InvalidRegularExpressionError(
                f"a pattern has from 1 to {LENGTH_MAX} characters, and this one {len(text):,}"
            )
        self.text = text
        self._states = _States(text)
        self._start = self._closure([self._states.build(_Parser(text).parse(), 0)])
        self._moves: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def matches(self, name: str) -> bool:
        """Whether the whole name is of the pattern."""
        states = self._start
        for character in name:
            following = self._moves.get((states, character))
            if following is None:
                following = self._move(states, character)
            if not following:
                return False
            states = following
        return 0 in states

    def _move(self, states: frozenset[int], character: str) -> frozenset[int]:
        reads, leads = self._states.reads, self._states.leads
        read = [leads[s][0] for s in states if (characters := reads[s]) is not None and characters.has(character)]
        following = self._closure(read)
        if len(self._moves) >= CACHED_SETS_MAX:
            self._moves.clear()
        self._moves[states, character] = following
        return following

    def _closure(self, states: list[int]) -> frozenset[int]:
        """All states that are reached without a character. Each is visited once."""
        reached, unvisited = set(states), list(states)
        while unvisited:
            state = unvisited.pop()
            if self._states.reads[state] is None:
                new = [lead for lead in self._states.leads[state] if lead not in reached]
                reached.update(new)
                unvisited += new
        return frozenset(reached)


@lru_cache(maxsize=PATTERNS_CACHED)
def compile_pattern(text: str) -> Pattern:
    """The pattern, from the last few that were compiled. Raises InvalidRegularExpressionError."""
    return Pattern(text)
