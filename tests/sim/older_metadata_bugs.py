"""A metadata log that is older than what brokers have seen: what notices it and keeps records, taken away again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import msgspec
import pytest

from spark_broker.broker.requests import BrokerRequests
from spark_broker.broker.seen_metadata import SeenMetadata
from spark_broker.controller import lineage
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.records import MetadataRecord, PartitionChangeRecord, ProducerIdsRecord
from spark_broker.protocol.messages import MetadataSeen
from tests.sim import bugs
from tests.sim.kinds import has_older_metadata

Patch = pytest.MonkeyPatch

bug = partial(bugs.bug, "F3", shows=has_older_metadata)


@bug()
def let_brokers_in_that_have_seen_more(patch: Patch) -> None:
    """A broker registers although the metadata lacks what it has seen."""
    patch.setattr(lineage, "newer_than", lambda *_: None)


@bug()
def delete_what_the_metadata_does_not_know(patch: Patch) -> None:
    """A replica is deleted because its topic is not in the metadata, which may be an older copy."""
    patch.setattr(lineage, "may_be_deleted", lambda *_: True)


@bug()
def trust_the_isr_of_older_metadata(patch: Patch) -> None:
    """Accepted metadata keeps its ISRs: a member may lack what was committed after the copy was made."""
    patch.setattr(lineage, "_compare_all", lambda *_: ())


@bug()
def give_leader_epochs_twice(patch: Patch) -> None:
    """After older metadata was accepted, leader epochs go on where the copy has them."""
    compare_all = lineage._compare_all

    def buggy(image: MetadataImage) -> Iterable[PartitionChangeRecord]:
        for record in compare_all(image):
            yield msgspec.structs.replace(record, leader_epoch=None)

    patch.setattr(lineage, "_compare_all", buggy)


def _accept_without_ids(patch: Patch) -> None:
    accept = lineage.accept

    def buggy(image: MetadataImage) -> Sequence[MetadataRecord]:
        return [record for record in accept(image) if not isinstance(record, ProducerIdsRecord)]

    patch.setattr(lineage, "accept", buggy)


@bug()
def give_numbers_twice(patch: Patch) -> None:
    """Producer ids, launches and offsets of the metadata go on where the copy has them."""
    patch.setattr(lineage, "beyond", lambda *_: ())
    _accept_without_ids(patch)


@bug(rare=True)
def give_ids_twice_that_no_broker_has_saved(patch: Patch) -> None:
    """An accepted copy goes on with producer ids above those that brokers have saved, and no further."""
    _accept_without_ids(patch)


@bug(rare=True)
def remember_acceptance_at_the_next_checkpoint(patch: Patch) -> None:
    """Leaders are elected before the brokers have saved that older metadata was accepted."""
    patch.setattr(SeenMetadata, "has_acceptance", lambda *_: True)


@bug(rare=True)
def pass_on_what_is_asked_of_a_controller_that_lets_nobody_in(patch: Patch) -> None:
    """A broker that has not registered passes on what clients ask of the controller."""
    patch.setattr(BrokerRequests, "_is_member", lambda _: True)


@bug(rare=True)
def go_beyond_one_acceptance_only(patch: Patch) -> None:
    """Where a broker has seen two acceptances more than the metadata has, leader epochs go beyond one of them."""
    beyond = lineage.beyond

    def buggy(image: MetadataImage, known: MetadataSeen) -> Iterable[MetadataRecord]:
        for record in beyond(image, known):
            if isinstance(record, PartitionChangeRecord):
                state = image.partition(record.topic_id, record.partition)
                assert state is not None
                yield msgspec.structs.replace(record, leader_epoch=state.leader_epoch + lineage.NUMBERS_SPARED)
            else:
                yield record

    patch.setattr(lineage, "beyond", buggy)
