"""Topics that no client uses. They come and go under all other faults: what becomes of their files is the point."""

from __future__ import annotations

from spark_broker.model import NAME_MAX
from spark_broker.protocol.messages import CreateTopicRequest
from spark_broker.testing.simulation.swarm import Swarm

_PREFIX = "aside"
_NAMES = 3


def is_aside(topic: str) -> bool:
    """Whether it is one of the topics that no client uses."""
    return topic.startswith(_PREFIX)


class AsideTopics:
    """Names come back: a directory may still be there, of an earlier topic of the name."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._requested = 0

    def request(self) -> CreateTopicRequest:
        """The next topic."""
        self._requested += 1
        number = self._requested % _NAMES
        return CreateTopicRequest(
            name=f"{_PREFIX}{number}".ljust(NAME_MAX if number == 1 else 1, "-"),
            partitions=self._swarm.partitions,
            replication_factor=self._swarm.replication_factor,
            schema=b"",
            config={},
        )
