"""Members of consumer groups without the client library: heartbeats as on the wire, as many as a member needs."""

from __future__ import annotations

import threading

from spark_broker.errors import RequestTimedOutError, SparkBrokerError
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    MemberAbout,
    Message,
    TopicPartitions,
)
from tests.broker.raw_client import RawClient

SESSION_MS = 60_000
HELD_MS = 500
"""An answer that has not come by then is held back: there is nothing to do."""
ROUNDS_MAX = 30
RETRY_S = 0.05
TRIES_MAX = 600


class RawMember:
    """A member whose session lasts longer than the test. It owns what it is given, at once."""

    def __init__(
        self, client: RawClient, group_id: str, member_id: str, topics: list[str], *, instance_id: str = ""
    ) -> None:
        self._client = client
        self._pause = threading.Event()
        self._group_id = group_id
        self._member_id = member_id
        self._instance_id = instance_id
        self._about = MemberAbout(topics, "", "", f"reader-{member_id}", "a-host", SESSION_MS, 4 * SESSION_MS, "")
        self._sequence, self._generation = 0, -1
        self.epoch = 0
        self.owned: list[TopicPartitions] = []

    @property
    def partitions(self) -> list[int]:
        return [number for topic in self.owned for number in topic.partitions]

    def beat(self) -> bool:
        """One heartbeat, and whether it was answered: if not, the member has nothing to do."""
        self._sequence += 1
        request = self._request(self.owned, self._about)
        try:
            answer = self._sent(request)
        except RequestTimedOutError:
            return False
        assert isinstance(answer, ConsumerGroupHeartbeatResponse)
        self.epoch, self._generation = answer.member_epoch, answer.generation
        self.owned = self.owned if answer.assignment is None else answer.assignment
        return True

    def _sent(self, request: ConsumerGroupHeartbeatRequest) -> Message:
        """The coordinator's answer, once there is one that coordinates. Raises RequestTimedOutError."""
        for _ in range(TRIES_MAX):
            try:
                coordinator = self._client.coordinator(self._group_id, CONSUMER_OFFSETS_TOPIC)
                answer: Message = self._client.connection(coordinator).call(request, timeout_ms=HELD_MS)
            except RequestTimedOutError:
                raise
            except SparkBrokerError as error:
                if not error.retriable:
                    raise
                self._pause.wait(RETRY_S)
            else:
                return answer
        raise AssertionError(f"nobody coordinates {self._group_id}")

    def leave(self) -> None:
        self._sequence += 1
        self.epoch = -1
        self._client.ask(self._group_id, self._request(None, None), CONSUMER_OFFSETS_TOPIC)

    def _request(self, owned: list[TopicPartitions] | None, about: MemberAbout | None) -> ConsumerGroupHeartbeatRequest:
        return ConsumerGroupHeartbeatRequest(
            *(self._group_id, self._member_id, self.epoch, self._sequence, self._generation),
            *(owned, about, self._instance_id),
        )


def settle(*members: RawMember) -> None:
    """Heartbeats of all of them, until none has anything to do."""
    for _ in range(ROUNDS_MAX):
        answered = [member.beat() for member in members]
        if not any(answered):
            return
    raise AssertionError("the members do not come to rest")
