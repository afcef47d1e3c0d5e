"""Files that were replaced by older ones, or are gone: what notices them, taken away again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from spark_broker.broker.high_watermarks import SavedHighWatermarks
from spark_broker.broker.log_opener import LogOpener
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.controller import registration
from spark_broker.storage.directory import LogDirectory
from tests.sim import bugs
from tests.sim.kinds import has_disk_faults

Patch = pytest.MonkeyPatch

bug = partial(bugs.bug, shows=has_disk_faults)


@bug("F4", quick=False)
def believe_a_log_that_ends_too_early(patch: Patch) -> None:
    """A log that ends below what it has committed is opened as it is, and may lead."""
    patch.setattr(LogOpener, "_check_end", lambda *_: None)


@bug("F4", quick=False)
def believe_an_older_copy(patch: Patch) -> None:
    """A log directory that does not know its last registration keeps its place in ISR and ELR."""
    patch.setattr(registration, "_is_older_copy", lambda *_: False)


@bug("F4", rare=True)
def keep_a_mark_of_a_log_that_was_made_shorter(patch: Patch) -> None:
    """The saved high watermark is not lowered before a log is rebuilt: a good log is taken for a damaged one."""

    @contextmanager
    def buggy(self: SavedHighWatermarks, key: PartitionKey, offset: int) -> Iterator[None]:
        del self, key, offset
        yield

    patch.setattr(SavedHighWatermarks, "lowering", buggy)


@bug("F1", quick=False)
def delete_a_newer_topic_of_the_name(patch: Patch) -> None:
    """A deletion that comes late takes the directory of the topic that has the name by then."""
    patch.setattr(LogDirectory, "_belongs_to", lambda *_: True)
