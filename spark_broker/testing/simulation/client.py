"""What simulated clients share: they get metadata from any broker, and back off between requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from spark_broker.client.cluster_view import ClusterView, merge
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.messages import CallRequest, MetadataRequest, MetadataResponse
from spark_broker.testing.simulation.network import NetworkNode

if TYPE_CHECKING:
    from spark_broker.testing.simulation.world import World

BACKOFF_MS = 20
BACKOFF_MAX_MS = 400
REFRESH_TIMEOUT_MS = 500


class Client(NetworkNode):
    """Asks one broker after the other until one answers, and then calls `refreshed`."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(name, name)
        self.world = world
        self.view = ClusterView()  # as production merges the answers
        self._learned: MetadataResponse | None = None
        self._round_due = False
        self._rounds = 0

    def start(self) -> None:
        """Begin to work."""
        raise NotImplementedError

    def refreshed(self) -> bool:
        """New metadata is there. Returns whether more is needed."""
        raise NotImplementedError

    def want_metadata(self) -> None:
        """Ask soon; at most one request is under way."""
        if not self._round_due:
            self._round_due = True
            wait_ms = min(BACKOFF_MAX_MS, BACKOFF_MS * 2 ** min(self._rounds, 6))
            self.world.scheduler.after(wait_ms, self, "ask for metadata", self._ask)

    def ask_any(
        self,
        request: CallRequest,
        on_answer: Callable[[object], None],
        on_error: Callable[[SparkBrokerError], None],
        timeout_ms: float = REFRESH_TIMEOUT_MS,
    ) -> None:
        """Ask any broker, once."""
        machine = self.world.client_rng.choice(self.world.machines)
        self.world.network.call(
            self,
            machine.host,
            machine.address,
            request,
            timeout_ms=timeout_ms,
            on_answer=on_answer,
            on_error=on_error,
        )

    def learn(self, answer: object) -> None:
        """A broker has answered a MetadataRequest, or could not."""
        if isinstance(answer, MetadataResponse) and answer is not self._learned:
            self._learned = answer
            self.view = merge(self.view, answer, None)

    def _ask(self) -> None:
        self._rounds += 1
        self.ask_any(MetadataRequest(), self._metadata_came, lambda _: self._again())

    def _metadata_came(self, answer: object) -> None:
        self._round_due = False
        self.learn(answer)
        if self.refreshed():
            self.want_metadata()
        else:
            self._rounds = 0

    def _again(self) -> None:
        self._round_due = False
        self.want_metadata()
