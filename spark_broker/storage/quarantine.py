"""The list of a broker's replicas that were quarantined because their log was damaged, and are not in sync again.

The list is written before the damaged directory is moved away. If the process then ends, the next process knows that
the replica in that place lacks records, and reports this to the controller before the replica may lead. The list also
says which directories are still to be moved: the next process must not take a damaged log for a rebuilt one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from spark_broker.storage.checkpoints import read_checkpoint_as, write_checkpoint
from spark_broker.storage.filesystem import LOCAL, FileSystem

QUARANTINE_FILE = "set-aside.json"

Replica = tuple[str, int]
"""Topic id and partition number."""


class Quarantine(NamedTuple):
    """`unmoved`: the replicas whose damaged directory is still in its place, with their topics' names.

    Invariant: `unmoved` names only `replicas`.
    """

    replicas: frozenset[Replica]
    unmoved: Mapping[Replica, str]


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A line of the list. `unmoved`: the topic's name, or empty. Earlier versions wrote no such field."""

    topic_id: str
    partition: int
    unmoved: str = ""


def read_quarantine(directory: Path, *, fs: FileSystem = LOCAL) -> Quarantine:
    """The list in a broker's directory; empty where there is none. Raises DamagedLogError, OSError."""
    entries = read_checkpoint_as(directory / QUARANTINE_FILE, list[_Entry], fs=fs, dispensable=True) or ()
    unmoved = {(entry.topic_id, entry.partition): entry.unmoved for entry in entries if entry.unmoved}
    return Quarantine(frozenset((entry.topic_id, entry.partition) for entry in entries), unmoved)


def write_quarantine(
    directory: Path, replicas: Iterable[Replica], unmoved: Mapping[Replica, str], *, fs: FileSystem = LOCAL
) -> None:
    """Replace the list, durably. Raises OSError."""
    entries = [(*replica, unmoved[replica]) if replica in unmoved else replica for replica in sorted(replicas)]
    write_checkpoint(directory / QUARANTINE_FILE, entries, fs=fs)
