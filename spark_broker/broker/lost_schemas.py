"""Schemas that logs of this broker have, and the metadata lacks: it is an older copy that was accepted.

Segments begin with the schema of their batches. So the brokers can tell the controller what the older copy has lost.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from spark_broker.controller.image import MetadataImage
from spark_broker.protocol.messages import TopicSchema
from spark_broker.protocol.schema_ids import is_known

logger = logging.getLogger(__name__)

TOLD_BYTES = 4 << 20
"""About so many bytes of schemas are in one heartbeat. The next one has others, once the metadata knows these."""


class LostSchemas:
    """The caller holds a lock for `found` and `forget`; the others are safe from any thread."""

    def __init__(self) -> None:
        self._schemas: Mapping[str, Mapping[int, bytes]] = {}  # by topic id and schema id; replaced, never changed

    def found(self, topic_id: str, name: str, schemas: Mapping[int, bytes]) -> None:
        """A log of the topic was opened that has these."""
        before = self._schemas.get(topic_id, {})
        new = {schema_id: message for schema_id, message in schemas.items() if schema_id not in before}
        if new:
            self._schemas = {**self._schemas, topic_id: {**before, **new}}
            fields = {"topic": name, "schema_ids": sorted(new)}
            logger.warning("logs of %(topic)s have schemas %(schema_ids)s, which the metadata lacks", fields)

    def forget(self, image: MetadataImage) -> None:
        """Forget what the metadata knows by now, and topics that are gone."""
        if self._schemas:
            kept = {topic_id: self._lost(image, topic_id) for topic_id in self._schemas}
            self._schemas = {topic_id: schemas for topic_id, schemas in kept.items() if schemas}

    def lacks(self, image: MetadataImage, topic_id: str) -> bool:
        """Whether the metadata lacks a schema of the topic that a log here has."""
        return bool(self._lost(image, topic_id))

    def to_tell(self, image: MetadataImage) -> list[TopicSchema]:
        """What the controller is to hear next."""
        told: list[TopicSchema] = []
        left_bytes = TOLD_BYTES
        for topic_id in sorted(self._schemas):
            for schema_id, message in sorted(self._lost(image, topic_id).items()):
                if left_bytes <= 0:
                    return told
                left_bytes -= len(message)
                told.append(TopicSchema(topic_id, schema_id, message))
        return told

    def _lost(self, image: MetadataImage, topic_id: str) -> Mapping[int, bytes]:
        lost, topic = self._schemas.get(topic_id), image.topics.get(topic_id)
        if lost is None or topic is None:
            return {}
        return {schema_id: message for schema_id, message in lost.items() if not is_known(topic.schemas, schema_id)}
