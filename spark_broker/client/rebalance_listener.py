"""What a member of a group is told when partitions come and go."""

from __future__ import annotations

from collections.abc import Sequence

from spark_broker.model import TopicPartition


class RebalanceListener:
    """Subclass it, and override what you need. `poll` (or the iteration) calls it, between two records.

    A method may call the consumer: `commit`, `seek`, `position`, `pause`. It may not poll. An exception that it raises
    is raised by `poll`; the partitions have come or gone all the same.
    """

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """The consumer reads these from now on. They are in `assignment()`, so a `seek` is possible."""

    def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """The consumer gives these up: another member gets them once this returns.

        With enable.auto.commit their positions are committed already. Otherwise this is the moment to do so.
        """

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """The group went on without this consumer, and other members may read these already. A commit would be refused.

        Calls `on_revoked` unless it is overridden.
        """
        self.on_revoked(partitions)
