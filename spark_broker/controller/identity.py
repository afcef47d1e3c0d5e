"""Which broker id a log directory has: the id belongs to the directory, not to the process."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from spark_broker.controller.image import MetadataImage
from spark_broker.errors import InconsistentClusterIdError
from spark_broker.protocol.messages import RegisterBrokerRequest


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """`new_directory`: the id had another directory before (KIP-966: the replicas under it are empty)."""

    broker_id: int
    new_directory: bool = False


def identify(
    image: MetadataImage, request: RegisterBrokerRequest, lost: Collection[int], *, forgotten: bool = False
) -> BrokerIdentity:
    """The id of the directory that asks. `forgotten`: the metadata may be older than the directory, and not know it.

    `lost`: brokers whose directories count as lost; an empty directory may take such an id over. Raises
    InconsistentClusterIdError for a directory that claims an id that is not its own; the directory is kept.
    """
    owner = image.broker_of_directory(request.directory_id)
    if owner is not None and request.broker_id in (-1, owner.id):
        return BrokerIdentity(owner.id)
    if forgotten and owner is None and request.broker_id >= 0 and request.broker_id not in image.brokers:
        return BrokerIdentity(request.broker_id)
    if owner is not None or request.broker_id >= 0:
        raise InconsistentClusterIdError(
            f"the log directory {request.directory_id} claims broker id {request.broker_id}, which "
            + (f"is not its own ({owner.id})" if owner is not None else "belongs to another directory")
        )
    free = [id_ for id_ in sorted(lost) if _may_take_over(image, id_)]
    return BrokerIdentity(free[0], new_directory=True) if free else BrokerIdentity(image.next_broker_id)


def _may_take_over(image: MetadataImage, broker_id: int) -> bool:
    """Whether an empty directory may get this id: not while a partition has no other member in ISR and ELR.

    What is left of such a partition may be in the lost directory, and the empty one would count as its replica.
    """
    broker = image.brokers.get(broker_id)
    if broker is None or not broker.fenced:
        return False
    return not any(
        broker_id in state.replicas and {*state.isr, *state.elr} <= {broker_id} for _, _, state in image.partitions()
    )
