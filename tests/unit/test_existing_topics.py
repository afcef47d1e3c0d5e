"""What a streaming query takes for gone: nothing that only a broker that lags behind does not know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import pytest

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import Deadline
from spark_broker.errors import UnknownTopicOrPartitionError
from spark_broker.protocol.messages import PartitionMetadata
from spark_broker.spark.cluster import KnownTopic, existing_topics
from spark_broker.spark.selection import SubscribedTopics


def topic(partitions: int, topic_id: str = "id") -> TopicView:
    states = tuple(PartitionMetadata(number, 0, 0, [0], [0], 0) for number in range(partitions))
    return TopicView("t", topic_id, states, (), {})


class Metadata:
    """What brokers say of `t`, one after the other; the last one says it for good."""

    def __init__(self, *views: TopicView) -> None:
        self.views = list(views)

    def use(self, names: Iterable[str]) -> None:
        pass

    def refresh(self, deadline: Deadline) -> None:
        pass

    def topic(self, name: str, deadline: Deadline, *, partition: int = 0) -> TopicView:
        while True:
            view = self.views[0]
            if partition < len(view.partitions):
                return view
            if len(self.views) == 1:
                raise UnknownTopicOrPartitionError(f"{name!r} has {len(view.partitions)} partitions")
            del self.views[0]


@pytest.mark.parametrize(
    ("views", "found"),
    [
        ([topic(1), topic(1), topic(2)], 2),  # The first ones lag behind.
        ([topic(1)], 1),  # An older copy of the metadata was accepted.
        ([topic(1, "another"), topic(2, "another")], 1),  # It was created again.
    ],
)
def test_a_partition_that_is_read_is_asked_for_until_its_absence_is_certain(views: list[TopicView], found: int) -> None:
    """Story: it was taken for gone, left out of the checkpoint, and read again from its first record."""
    metadata = cast("ClusterMetadata", Metadata(*views))
    (seen,) = existing_topics(metadata, SubscribedTopics(("t",)), {"t": KnownTopic("id", 2)}, Deadline.after_ms(1000))
    assert len(seen.partitions) == found
