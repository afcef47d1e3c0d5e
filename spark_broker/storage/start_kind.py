"""How the last process ended, which decides what its files may look like."""

from __future__ import annotations

from enum import StrEnum


class StartKind(StrEnum):
    """What may be wrong with the files of a log directory."""

    CLEAN = "clean"
    """Everything was synced, then the clean marker was written: nothing may be wrong."""
    PROCESS_CRASH = "process_crash"
    """The machine did not crash: every write that returned is there. Only the last write may be unfinished."""
    MACHINE_CRASH = "machine_crash"
    """What was not synced may be missing or torn, in any order."""
