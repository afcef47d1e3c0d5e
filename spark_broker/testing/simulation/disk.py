"""What a simulated disk holds: for each file and directory, what is visible, what is durable, and what lies between.

A change is visible at once and *pending* until it is synced. A crash of the machine keeps those of a node's pending
changes that a `Survival` chooses; the rest never happened.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

SECTOR_BYTES = 512


class Write(NamedTuple):
    """Bytes written at a position of a file."""

    position: int
    data: bytes


class Cut(NamedTuple):
    """A file made this long."""

    length: int


class Rename(NamedTuple):
    """A name of a directory: from `source` (empty: created) to `target` (empty: removed), in one step."""

    source: str
    target: str
    node: Node


Content = Write | Cut


@dataclass(slots=True, eq=False)
class File:
    """One file, apart from its names."""

    number: int
    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[Content] = field(default_factory=list)
    names: int = 0
    handles: int = 0
    locked_by: int = -1
    """The handle that has the lock."""

    def change(self, change: Content) -> None:
        """Make a change that is not durable yet."""
        apply(self.content, change)
        self.pending.append(change)

    def sync(self) -> None:
        """Make the pending changes durable."""
        for change in self.pending:
            apply(self.durable, change)
        self.pending.clear()


@dataclass(slots=True, eq=False)
class Directory:
    """One directory: names of files and directories."""

    number: int
    entries: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[Rename] = field(default_factory=list)

    def change(self, change: Rename) -> None:
        """Make a change that is not durable yet."""
        rename(self.entries, change)
        self.pending.append(change)

    def sync(self) -> None:
        """Make the pending changes durable."""
        for change in self.pending:
            rename(self.durable, change)
        self.pending.clear()


Node = File | Directory


@dataclass(slots=True)
class Handle:
    """A file that the process `pid` has open."""

    file: File
    path: str
    writable: bool
    pid: int


def apply(content: bytearray, change: Content) -> None:
    """Carry a change of content out; a gap before a write is zeros."""
    if isinstance(change, Cut):
        if change.length <= len(content):
            del content[change.length :]
        else:
            content.extend(bytes(change.length - len(content)))
        return
    position, data = change
    if position > len(content):
        content.extend(bytes(position - len(content)))
    content[position : position + len(data)] = data


def rename(entries: dict[str, Node], change: Rename) -> None:
    """Carry a change of names out, as far as possible where earlier changes were lost."""
    if change.source and entries.get(change.source) is change.node:
        del entries[change.source]
    if change.target:
        entries[change.target] = change.node


class Survival(Protocol):
    """Which pending changes a crash of the machine leaves behind."""

    def of_content(self, change: Content) -> list[Content]:
        """What remains of one change: nothing, all, or parts of a write."""
        ...

    def of_names(self, changes: list[Rename]) -> list[Rename]:
        """Those of a directory's changes that remain, in order."""
        ...

    def begin(self, node: Node) -> None:
        """The calls that follow are about this node."""
        ...


class RandomSurvival:
    """Draws for each node what is lost: nothing, everything, a suffix, or any of the changes. Writes may be torn."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._kept = 1.0
        self._ordered = False
        self._torn = 0.0

    def begin(self, node: Node) -> None:
        self._kept = self._rng.choice((0.0, 0.5, 0.9, 1.0))
        self._ordered = self._rng.random() < 0.5
        self._torn = self._rng.choice((0.0, 0.3))

    def of_content(self, change: Content) -> list[Content]:
        if self._rng.random() >= self._kept:
            self._kept = 0.0 if self._ordered else self._kept
            return torn(change, self._rng) if self._rng.random() < self._torn else []
        return [change]

    def of_names(self, changes: list[Rename]) -> list[Rename]:
        if self._ordered:  # As a journal keeps them.
            return changes[: self._rng.randint(0, len(changes))]
        return [change for change in changes if self._rng.random() < self._kept]


def torn(change: Content, rng: random.Random) -> list[Content]:
    """A part of a write: a prefix of any length, or some of the sectors it touches."""
    if isinstance(change, Cut):
        return []
    position, data = change
    if rng.random() < 0.5:
        return [Write(position, data[: rng.randrange(len(data) + 1)])]
    bounds = [position, *range(position - position % SECTOR_BYTES + SECTOR_BYTES, position + len(data), SECTOR_BYTES)]
    ends = [*bounds[1:], position + len(data)]
    kept = [(a, b) for a, b in zip(bounds, ends, strict=True) if rng.random() < 0.5]
    return [Write(a, data[a - position : b - position]) for a, b in kept]


class ChosenSurvival:
    """Keeps exactly those pending changes whose bit is set, counted in the order of `pending_changes`."""

    def __init__(self, kept: int) -> None:
        self._kept = kept

    def begin(self, node: Node) -> None:
        """Nothing depends on the node."""

    def of_content(self, change: Content) -> list[Content]:
        return [change] if self._take() else []

    def of_names(self, changes: list[Rename]) -> list[Rename]:
        return [change for change in changes if self._take()]

    def _take(self) -> bool:
        taken = bool(self._kept & 1)
        self._kept >>= 1
        return taken


def nodes(root: Directory) -> Iterator[Node]:
    """Every node that is or may be reachable after a crash, each once, in an order that depends on history alone."""
    seen = {root.number}
    queue: list[Node] = [root]
    for node in queue:
        yield node
        if isinstance(node, Directory):
            below = [*node.durable.values(), *node.entries.values(), *(change.node for change in node.pending)]
            for child in below:
                if child.number not in seen:
                    seen.add(child.number)
                    queue.append(child)


def settle(root: Directory, survival: Survival) -> None:
    """The crash: what survives becomes both durable and visible; nothing is pending, open or locked."""
    for node in list(nodes(root)):
        survival.begin(node)
        if isinstance(node, File):
            for change in node.pending:
                for part in survival.of_content(change):
                    apply(node.durable, part)
            node.content = bytearray(node.durable)
            node.handles, node.names, node.locked_by = 0, 0, -1
        else:
            for renamed in survival.of_names(node.pending):
                rename(node.durable, renamed)
            node.entries = dict(node.durable)
        node.pending = []
    for node in list(nodes(root)):
        if isinstance(node, Directory):
            for child in node.entries.values():
                if isinstance(child, File):
                    child.names += 1


def copied(root: Directory) -> Directory:
    """A copy of everything below, pending changes included; no handle of it is open."""
    originals = list(nodes(root))
    copies: dict[int, Node] = {}
    for node in originals:
        if isinstance(node, File):
            copies[node.number] = File(
                node.number, bytearray(node.content), bytearray(node.durable), list(node.pending), node.names
            )
        else:
            copies[node.number] = Directory(node.number)
    for node in originals:
        copy = copies[node.number]
        if isinstance(node, Directory) and isinstance(copy, Directory):
            copy.entries = {name: copies[child.number] for name, child in node.entries.items()}
            copy.durable = {name: copies[child.number] for name, child in node.durable.items()}
            copy.pending = [Rename(a, b, copies[child.number]) for a, b, child in node.pending]
    copy = copies[root.number]
    return copy if isinstance(copy, Directory) else root


def fingerprint(root: Directory) -> bytes:
    """A hash of what is visible, durable and pending everywhere below. Equal disks of copies have equal ones."""
    digest = hashlib.blake2b(digest_size=16)
    for node in nodes(root):
        if isinstance(node, File):
            for part in (node.content, node.durable):
                digest.update(b"file %d %d " % (node.number, len(part)))
                digest.update(part)
            digest.update(repr(node.pending).encode())
        else:
            names = [[(name, child.number) for name, child in of.items()] for of in (node.entries, node.durable)]
            pending = [(source, target, child.number) for source, target, child in node.pending]
            digest.update(repr((node.number, names, pending)).encode())
    return digest.digest()


def pending_changes(root: Directory) -> int:
    """How many changes a crash of the machine could undo."""
    return sum(len(node.pending) for node in nodes(root))


def directories_of(root: Directory) -> dict[str, Directory]:
    """Every visible directory by its path."""
    directories = {"/": root}
    queue = [("", root)]
    for prefix, directory in queue:
        for name, node in directory.entries.items():
            if isinstance(node, Directory):
                directories[f"{prefix}/{name}"] = node
                queue.append((f"{prefix}/{name}", node))
    return directories
