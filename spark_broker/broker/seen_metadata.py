"""Which metadata a log directory remembers: an older copy of the metadata log is known by what it lacks."""

from __future__ import annotations

import logging
import threading

from spark_broker.controller import lineage
from spark_broker.controller.image import MetadataImage
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.messages import MetadataSeen
from spark_broker.storage.directory import LogDirectory

logger = logging.getLogger(__name__)


class SeenMetadata:
    """What the directory remembers of it. `saved`: None where that is nothing. Safe for use by many threads."""

    def __init__(self, directory: LogDirectory) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self.saved = directory.read_seen()

    def save(self, image: MetadataImage) -> None:
        """Remember this image, unless a later one is. Where that fails, the directory goes on knowing less."""
        seen = lineage.seen(image)
        with self._lock:
            if seen != self.saved and (self.saved is None or seen.next_offset >= self.saved.next_offset):
                self._write(seen)

    def _write(self, seen: MetadataSeen) -> None:
        try:
            self._directory.write_seen(seen)
        except SparkBrokerError as error:
            logger.warning("which metadata was seen is not saved: %s", error)
        else:
            self.saved = seen

    def has_acceptance(self, image: MetadataImage) -> bool:
        """Whether the directory knows each acceptance of older metadata that the image has.

        The same copy may be accepted once more, and would give out the same leader epochs. Only those tell it who have
        compared their replicas after this acceptance. So a broker names no log end, and nobody is elected, before that.
        """
        return lineage.acceptances(image) <= (0 if self.saved is None else lineage.acceptances(self.saved))
