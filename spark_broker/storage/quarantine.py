"""Which replicas of a broker were quarantined because their log was damaged, and are not in sync again.

Written before the damaged directory is moved away: whenever its process ends after that, the next one knows that the
replica it finds (or makes) in its place lacks records, and says so before it may lead.
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
