"""Where batches lie in a file. A reader on the same machine reads the file itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from spark_broker.protocol.frame import BatchHeader


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Messages of consecutive batches, one after the other, from byte `position` of the file on.

    `file_id`: device and inode of the file that had this path when the run was looked up.
    """

    path: Path
    file_id: tuple[int, int]
    position: int
    headers: Sequence[BatchHeader]

    @property
    def length(self) -> int:
        """Bytes of the messages."""
        return sum(header.length for header in self.headers)

    def without(self, is_left_out: Callable[[BatchHeader], bool]) -> Iterator[StoredRun]:
        """The runs that remain when these batches are left out."""
        position = self.position
        for left_out, group in groupby(self.headers, is_left_out):
            run = StoredRun(self.path, self.file_id, position, list(group))
            position += run.length
            if not left_out:
                yield run
