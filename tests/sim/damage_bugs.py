"""Known bug 28, put back into production code: damage that is cleaned up, served, or kept from the controller.

A leader epoch that does not rise with the damage of a follower is not here: a fetch or a proposal would have to
overtake the report, and in 10,000 schedules none does. `tests/unit/controller/test_failover.py` covers it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import pytest

from spark_broker.broker.damaged import DamagedReplicas
from spark_broker.broker.partition import Partition
from spark_broker.client import local_files
from spark_broker.controller import damage
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.records import MetadataRecord
from spark_broker.errors import DamagedLogError
from spark_broker.protocol.frame import BatchHeader, Frame
from spark_broker.protocol.wire import Buffer
from spark_broker.storage import segment
from tests.sim import bugs
from tests.sim.kinds import has_bit_flips

Patch = pytest.MonkeyPatch

bug = partial(bugs.bug, shows=has_bit_flips)


@bug("28")
def clean_damage_up(patch: Patch) -> None:
    """The damaged batch and what follows it is cut off, and the replica goes on."""

    def buggy(self: Partition, offset: int, max_bytes: int, end_offset: int) -> list[Frame]:
        try:
            return self._log.read(offset, max_bytes, end_offset)
        except DamagedLogError:
            with self.lock:
                replica = self.replica
                self._log.truncate_to(offset)
                replica.log_end_offset = self._log.log_end_offset
                replica.high_watermark = min(replica.high_watermark, replica.log_end_offset)
                replica.epochs = replica.epochs.truncate_to(replica.log_end_offset)
                replica.producers = self._log.rebuild_producers(replica.high_watermark)
            return []

    patch.setattr(Partition, "read_log", buggy)


@bug("28")
def serve_damage(patch: Patch) -> None:
    """What is read is sent as it is, without a look at its checksum; who gets it has to look."""

    def buggy(headers: Sequence[BatchHeader], data: bytes) -> list[Frame]:
        return unverified(headers, memoryview(data))

    patch.setattr(segment, "verified_frames", buggy)


def unverified(headers: Sequence[BatchHeader], view: memoryview) -> list[Frame]:
    at, frames = 0, []
    for header in headers:
        frames.append(Frame(header, view[at : at + header.length]))
        at += header.length
    return frames


@bug("28")
def take_a_leaders_file_as_it_is(patch: Patch) -> None:
    """A reader on the leader's machine does not look at the checksums of what it reads from the leader's files."""

    def buggy(headers: Sequence[BatchHeader], messages: Buffer) -> list[Frame]:
        return unverified(headers, memoryview(messages))

    patch.setattr(local_files, "verified_frames", buggy)


@bug("28")
def keep_damage_in_sync(patch: Patch) -> None:
    """The controller leaves a replica that was quarantined in the ISR and the ELR."""

    def buggy(
        image: MetadataImage, broker_id: int, partitions: Iterable[tuple[str, int]], full: Collection[int] = ()
    ) -> tuple[MetadataRecord, ...]:
        del image, broker_id, partitions, full
        return ()

    patch.setattr(damage, "quarantine", buggy)


@bug("28", quick=False)
def begin_anew_before_the_controller_has_heard(patch: Patch) -> None:
    """An empty replica comes in the place of the damaged one while that still counts, and may be elected."""
    patch.setattr(DamagedReplicas, "is_unheard", lambda self, key: False)
