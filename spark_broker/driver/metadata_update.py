"""The metadata updates that a controller sends to its brokers; `broker.membership.read_update` reads them."""

from __future__ import annotations

from collections.abc import Sequence

from spark_broker.controller.image import MetadataImage
from spark_broker.controller.records import MetadataRecord, encode_records
from spark_broker.controller.snapshot import to_records
from spark_broker.protocol.messages import MetadataUpdate


def records_update(image: MetadataImage, first_offset: int, records: Sequence[MetadataRecord]) -> MetadataUpdate:
    """The committed records from `first_offset` on, after which the image is `image`."""
    return MetadataUpdate(image.controller_epoch, first_offset, image.next_offset, encode_records(records))


def snapshot_update(image: MetadataImage) -> MetadataUpdate:
    """The whole image."""
    records = encode_records(to_records(image))
    return MetadataUpdate(image.controller_epoch, 0, image.next_offset, records, snapshot=True)
