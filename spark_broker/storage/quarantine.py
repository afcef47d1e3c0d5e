"""The list of a broker's replicas that were quarantined because their log was damaged, and are not in sync again.

The list is written before the damaged directory is moved away. If the process then ends, the next process knows that
the replica in that place lacks records, and reports this to the controller before the replica may lead.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from spark_broker.storage.checkpoints import read_checkpoint_as, write_checkpoint
from spark_broker.storage.filesystem import LOCAL, FileSystem

QUARANTINE_FILE = "set-aside.json"

Replica = tuple[str, int]
"""Topic id and partition number."""


def read_quarantine(directory: Path, *, fs: FileSystem = LOCAL) -> frozenset[Replica]:
    """The list in a broker's directory; empty where there is none. Raises DamagedLogError, OSError."""
    return frozenset(read_checkpoint_as(directory / QUARANTINE_FILE, list[Replica], fs=fs) or ())


def write_quarantine(directory: Path, replicas: Iterable[Replica], *, fs: FileSystem = LOCAL) -> None:
    """Replace the list, durably. Raises OSError."""
    write_checkpoint(directory / QUARANTINE_FILE, sorted(replicas), fs=fs)
