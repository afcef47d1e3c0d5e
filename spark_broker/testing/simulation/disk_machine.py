"""What all processes of a simulated machine share: its disk, its handles, and the faults that are to come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spark_broker.testing.simulation.disk import Directory, File, Handle, directories_of, nodes
from spark_broker.testing.simulation.operations import Fault, Operation

if TYPE_CHECKING:
    from spark_broker.testing.simulation.filesystem import SimFileSystem


@dataclass(slots=True)
class DiskMachine:
    """A machine, as its file systems see it."""

    name: str
    root: Directory = field(default_factory=lambda: Directory(0))
    directories: dict[str, Directory] = field(default_factory=dict)
    handles: dict[int, Handle] = field(default_factory=dict)
    processes: dict[int, SimFileSystem] = field(default_factory=dict)
    boots: int = 1
    last_number: int = 0
    last_pid: int = 0
    last_id: int = 0
    last_lock: int = -1
    directory_locks: dict[str, File] = field(default_factory=dict)  # by path
    used_bytes: int = 0
    capacity_bytes: int | None = None
    on_operation: Callable[[Operation], Fault | None] | None = None
    planned: list[tuple[str, str, Fault]] = field(default_factory=list)
    journal: list[Operation] | None = None

    def number(self) -> int:
        self.last_number += 1
        return self.last_number

    def index_directories(self) -> None:
        """Find every directory by its path again."""
        self.directories = directories_of(self.root)

    def look_anew(self) -> None:
        """The disk is not what it was."""
        self.index_directories()
        self._count_content()

    def _count_content(self) -> None:
        self.used_bytes = sum(len(node.content) for node in nodes(self.root) if isinstance(node, File))
