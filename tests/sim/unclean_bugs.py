"""Known bug 16, put back into production code: elections that lose records unasked, readers that are not notified."""

from __future__ import annotations

from functools import partial

import pytest

from spark_broker.broker.partition_reader import PartitionReader
from spark_broker.client.partition_position import PartitionPosition
from spark_broker.controller import unclean
from spark_broker.errors import LogTruncationError
from spark_broker.model import NO_EPOCH
from tests.sim import bugs
from tests.sim.kinds import may_have_unclean_elections

Patch = pytest.MonkeyPatch

bug = partial(bugs.bug, shows=may_have_unclean_elections)


@bugs.bug("16", quick=False)
def allow_unclean_elections_by_default(patch: Patch) -> None:
    """Unclean election is on where nobody has asked for it."""
    patch.setattr(unclean, "allows_unclean_election", lambda topic: True)


@bug("16", quick=False)
def fetch_without_the_epoch_that_was_read(patch: Patch) -> None:
    """KIP-320: a consumer does not name the epoch of what it has read, and reads on behind a cut."""
    patch.setattr(PartitionPosition, "fetched_epoch", property(lambda self: NO_EPOCH))


@bug("16", quick=False)
def serve_readers_of_another_history(patch: Patch) -> None:
    """KIP-320: a leader does not compare what a consumer has read with its own log."""
    patch.setattr(PartitionReader, "check_lineage", lambda self, leader_epoch, offset, epoch: None)


@bug("16")
def go_on_at_the_end_of_the_cut_log(patch: Patch) -> None:
    """A consumer that is told of a cut goes on where the log ends now, and not where it diverges from what was read."""
    notify = PartitionPosition.notify_truncation

    def buggy(self: PartitionPosition) -> LogTruncationError | None:
        read_to = self.fetch_offset
        error = notify(self)
        self.move_to(read_to)
        return error

    patch.setattr(PartitionPosition, "notify_truncation", buggy)
