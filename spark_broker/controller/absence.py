"""How long registered brokers have been away."""

from __future__ import annotations

from spark_broker.controller.cluster_loss import hosts
from spark_broker.controller.image import MetadataImage


class Absences:
    """Since when each broker without a session has been away.

    Time counts only while some broker is live. After a restart, or after the loss of all brokers, the first one that is
    back must not drop the others at once: Spark is still starting them.
    """

    def __init__(self) -> None:
        self._since_ms: dict[int, int] = {}
        self._someone_live_since_ms: int | None = None
        self._hosts: frozenset[int] = frozenset()  # had replicas when this controller began; empty once one is back
        self._replaced: set[int] = set()  # those of them whose ids empty directories have taken over

    def all_left(self, image: MetadataImage, now_ms: int) -> None:
        self._since_ms = dict.fromkeys(image.brokers, now_ms)
        self._someone_live_since_ms = None
        self._hosts = hosts(image)
        self._replaced = set()

    def left(self, broker_id: int, now_ms: int) -> None:
        self._since_ms.setdefault(broker_id, now_ms)

    def returned(self, broker_id: int, *, new_directory: bool = False) -> None:
        """`new_directory`: an empty directory has taken the id over. The one that had replicas is still away."""
        self._since_ms.pop(broker_id, None)
        if new_directory:
            self._replaced.add(broker_id)
        elif broker_id in self._hosts - self._replaced:
            self._hosts = frozenset()

    def note_live(self, image: MetadataImage, now_ms: int) -> None:
        """Must be called with every image in which brokers changed."""
        if not image.live_brokers():
            self._someone_live_since_ms = None
        elif self._someone_live_since_ms is None:
            self._someone_live_since_ms = now_ms

    def just_begun(self, duration_ms: int, now_ms: int) -> bool:
        """Whether no broker is live, or the first became live less than this ago: the others are still starting."""
        start = self._someone_live_since_ms
        return start is None or now_ms - start < duration_ms

    @property
    def replaced(self) -> frozenset[int]:
        """Brokers whose ids empty directories have taken over since this controller began."""
        return frozenset(self._replaced)

    def all_lost_for(self, duration_ms: int, now_ms: int) -> frozenset[int]:
        """The brokers that had replicas, if none of them was back for this long while some broker was live."""
        away = self.away_for(duration_ms, now_ms)
        return self._hosts if self._hosts - self._replaced <= away else frozenset()

    def away_for(self, duration_ms: int, now_ms: int) -> frozenset[int]:
        """Brokers that have been away for this long while some broker was live; none with a negative duration."""
        start = self._someone_live_since_ms
        if duration_ms < 0 or start is None:
            return frozenset()
        return frozenset(b for b, since in self._since_ms.items() if now_ms - max(since, start) >= duration_ms)
