"""A shell for `TransactionShard` without a broker: a log in memory whose commits the test decides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from spark_broker.core.transaction_changes import AnyRecord, decode_any, encode_any
from spark_broker.core.transaction_coordinator import (
    AnswerRequest,
    AppendRecords,
    CoordinatorRequest,
    DecideAgain,
    Effect,
    MarkerTarget,
    ProducerIdPool,
    Resources,
    StoreAnew,
    TransactionShard,
)
from spark_broker.core.transaction_decision import END_KEYS_MAX
from spark_broker.core.transaction_records import StoredRecord, encode_record
from spark_broker.errors import NotEnoughReplicasError, SparkBrokerError
from spark_broker.protocol.messages import Message

FAR_MS = 10**12
TIMEOUT_MAX_MS = 900_000

Answer = Message | SparkBrokerError


@dataclass
class Log:
    """The partition's records as bytes; those from `committed` on may be lost with the leader."""

    records: list[StoredRecord] = field(default_factory=list)
    committed: int = 0

    def decoded(self) -> list[AnyRecord]:
        return [decode_any(*record) for record in self.records]


class Driver:
    """Carries out effects as the contract says. `auto`: every append is committed and every marker written at once."""

    end_keys_max = END_KEYS_MAX

    def __init__(
        self,
        log: Log | None = None,
        ids: ProducerIdPool | None = None,
        *,
        auto: bool = True,
        id_expiration_ms: int = -1,
    ) -> None:
        self.log = log or Log()
        self.auto = auto
        self.now_ms = 0
        self.refusing = False  # appends, because the ISR is too small
        self.answers: dict[object, Answer] = {}
        self.targets: deque[MarkerTarget] = deque()
        if ids is None:
            ids = ProducerIdPool()
            ids.refill(1000, 1_000_000)
        self.ids = ids
        self.deleted: set[str] = set()  # topics
        resources = Resources(ids, TIMEOUT_MAX_MS, self.end_keys_max, lambda topic_id: topic_id not in self.deleted)
        self.shard = TransactionShard(resources, id_expiration_ms=id_expiration_ms)
        self._ends: list[int] = []  # log length after each append of this leader
        self._tokens = 0
        self.log.committed = len(self.log.records)
        for record in self.log.decoded():
            self.shard.replay(record)
        self.run(self.shard.loaded(self.now_ms))

    def run(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case AppendRecords():
                    self._append(effect)
                case StoreAnew(records):
                    for record in records:  # as if each were an append of its own
                        self.log.records.append(encode_any(record))
                        self._ends.append(len(self.log.records))
                        self.shard.stored_anew()
                case AnswerRequest(token, answer):
                    assert token not in self.answers, "answered twice"
                    self.answers[token] = answer
                case DecideAgain(waiting):
                    self.run(self.shard.decide(waiting, self.now_ms))
                case _:
                    self.targets += effect.targets
        if self.auto:
            self.settle()

    def _append(self, append: AppendRecords) -> None:
        if self.refusing:
            self.run(self.shard.append_refused(append, NotEnoughReplicasError("the ISR is too small")))
            return
        self.log.records += [encode_record(record) for record in self.shard.records(append)]
        self._ends.append(len(self.log.records))
        self.run(self.shard.appended(append, self.now_ms))

    def settle(self) -> None:
        """Commit everything and write every marker."""
        while self.shard.committed_count < self.shard.appended_count or self.targets:
            self.commit()
            while self.targets:
                self.run(self.shard.marked(self.targets.popleft()))

    def commit(self, count: int | None = None) -> None:
        """Commit the first `count` appends (None: all)."""
        count = self.shard.appended_count if count is None else count
        if count > self.shard.committed_count:
            self.log.committed = max(self.log.committed, self._ends[count - 1])
            self.run(self.shard.committed(count))

    def send(self, request: CoordinatorRequest, deadline_ms: int = FAR_MS) -> int:
        """Send a request; its answer (if there is one yet) is `answers[token]`."""
        self._tokens += 1
        token = self._tokens
        self.run(self.shard.request(token, request, deadline_ms, self.now_ms))
        return token

    def ask(self, request: CoordinatorRequest) -> Answer:
        """The answer, which must be there at once."""
        return self.answers[self.send(request)]

    def tick(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.run(self.shard.tick(now_ms))

    def fail_over(
        self,
        *,
        kept: int | None = None,
        auto: bool | None = None,
        compact: Callable[[list[StoredRecord]], list[StoredRecord]] = list,
    ) -> Driver:
        """Another leader, whose log has the committed records and `kept` appends after them (None: all)."""
        self.run(list(self.shard.dropped()))
        later = [end for end in self._ends if end > self.log.committed]
        end = [self.log.committed, *later][: None if kept is None else kept + 1][-1]
        committed = compact(self.log.records[: self.log.committed])
        log = Log([*committed, *self.log.records[self.log.committed : end]])
        return type(self)(log, self.ids, auto=self.auto if auto is None else auto)
