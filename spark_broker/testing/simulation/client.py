"""What simulated clients share: metadata from any broker, and a pace of asking for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_broker.controller.image import EMPTY_IMAGE, MetadataImage
from spark_broker.model import NO_LEADER
from spark_broker.protocol.messages import GetMetadata
from spark_broker.testing.simulation.network import Address, NetworkNode

if TYPE_CHECKING:
    from spark_broker.testing.simulation.world import World

BACKOFF_MS = 40.0
BACKOFF_MAX_MS = 400.0
REFRESH_TIMEOUT_MS = 500


class Client(NetworkNode):
    """Asks one broker after the other until one answers; `refreshed` hears of it."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(name, name)
        self.world = world
        self.image: MetadataImage = EMPTY_IMAGE
        self._round_due = False
        self._rounds = 0

    def start(self) -> None:
        """Begin to work."""
        raise NotImplementedError

    def refreshed(self) -> bool:
        """New metadata is there; whether more has to follow."""
        raise NotImplementedError

    def want_metadata(self) -> None:
        """Ask soon; at most one question is out."""
        if not self._round_due:
            self._round_due = True
            wait_ms = min(BACKOFF_MAX_MS, BACKOFF_MS * 2 ** min(self._rounds, 6))
            self.world.scheduler.after(wait_ms, self, "ask for metadata", self._ask)

    def _ask(self) -> None:
        self._rounds += 1
        machine = self.world.client_rng.choice(self.world.machines)
        self.world.network.call(
            self,
            machine.host,
            machine.address,
            GetMetadata(),
            timeout_ms=REFRESH_TIMEOUT_MS,
            on_answer=self._metadata_came,
            on_error=lambda _: self._again(),
        )

    def _metadata_came(self, answer: object) -> None:
        self._round_due = False
        if isinstance(answer, MetadataImage) and answer.next_offset >= self.image.next_offset:
            self.image = answer
        if self.refreshed():
            self.want_metadata()
        else:
            self._rounds = 0

    def _again(self) -> None:
        self._round_due = False
        self.want_metadata()

    def leader(self, topic_id: str, number: int) -> tuple[int, int, Address] | None:
        """Leader, leader epoch and the leader's address, as this client knows them."""
        state = self.image.partition(topic_id, number)
        if state is None or state.leader == NO_LEADER:
            return None
        broker = self.image.brokers.get(state.leader)
        return None if broker is None or broker.fenced else (broker.id, state.leader_epoch, (broker.host, broker.port))
