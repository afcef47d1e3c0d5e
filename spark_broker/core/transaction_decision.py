"""What a transaction coordinator decides about a request: the records, the answer and when the answer is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spark_broker.core.transaction_changes import AnyChange
from spark_broker.core.transaction_state import TransactionMetadata
from spark_broker.errors import CoordinatorNotAvailableError, InvalidTransactionTimeoutError
from spark_broker.protocol.messages import AddPartitionToTransactionResponse, Message


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer is given once the changes, and all earlier ones, are committed."""

    answer: Message
    changes: tuple[AnyChange, ...] = ()


@dataclass(frozen=True, slots=True)
class AfterEnd:
    """The answer is given once the id's transaction has ended everywhere. None: the request is then decided again."""

    changes: tuple[AnyChange, ...] = ()
    answer: Message | None = None


Decision = Answered | AfterEnd


class ProducerIdPool:
    """Producer ids that the controller has given to this broker. Each is taken once."""

    def __init__(self) -> None:
        self._blocks: list[range] = []

    def __len__(self) -> int:
        return sum(len(block) for block in self._blocks)

    def refill(self, first_id: int, count: int) -> None:
        """Another block, from `first_id` on."""
        self._blocks.append(range(first_id, first_id + count))

    def take(self) -> int:
        """Raises CoordinatorNotAvailableError when the pool is empty."""
        if not self._blocks:
            raise CoordinatorNotAvailableError("the broker waits for producer ids")
        block = self._blocks[0]
        if len(block) > 1:
            self._blocks[0] = block[1:]
        else:
            del self._blocks[0]
        return block[0]


RENEWALS = 10
"""How many times a leader renews a transaction's time-out within that time-out, while the producer goes on."""

RENEWAL_MS_MIN = 1000
"""A renewal counts for at least this long, where the time-out is much longer: an append follows it, on a machine that
may be slow.
"""


def added(transaction: TransactionMetadata) -> AddPartitionToTransactionResponse:
    """The answer to the leader of a partition that is in the open transaction."""
    renewal_ms = max(transaction.timeout_ms // RENEWALS, min(RENEWAL_MS_MIN, transaction.timeout_ms // 3), 1)
    return AddPartitionToTransactionResponse(renewal_ms)


END_KEYS_MAX = 2_000
"""An append that ends a transaction has so many tombstones at most. A key has a thousand bytes at most."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a decision needs in addition to the id's state.

    `has_topic`: whether a topic with this id is there. False is certain for the topics of a transaction: each was there
    when its partition was added, so it was deleted (see `MarkerQueue.gone`).
    """

    producer_ids: ProducerIdPool
    timeout_max_ms: int
    end_keys_max: int = END_KEYS_MAX
    has_topic: Callable[[str], bool] = lambda topic_id: True

    def check_timeout(self, timeout_ms: int) -> None:
        if not 0 < timeout_ms <= self.timeout_max_ms:
            raise InvalidTransactionTimeoutError(
                f"a transaction time-out of {timeout_ms} ms; from 1 to {self.timeout_max_ms} is allowed"
            )
