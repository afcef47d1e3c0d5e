"""What must hold after every step of a cluster; a ViolationError names the rule that is broken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from spark_broker.core.replica import Replica, Role
from spark_broker.errors import OffsetNotAvailableError
from tests.unit.core.harness import Cluster, Node
from tests.unit.core.memory_log import Entry


class ViolationError(AssertionError):
    """A rule of the replicated log is broken."""


def require(condition: bool, rule: str) -> None:
    if not condition:
        raise ViolationError(rule)


@dataclass(slots=True)
class Checker:
    """Remembers what it saw: committed records never change, and offsets that were shown never fall."""

    committed: dict[int, Entry] = field(default_factory=dict)  # by base offset
    named: dict[tuple[int, int], int] = field(default_factory=dict)  # (leader epoch, base offset) to value
    high_watermarks: dict[tuple[int, int], int] = field(default_factory=dict)  # by broker and process
    stable: dict[tuple[int, int], int] = field(default_factory=dict)  # last stable offsets by broker and process
    # By read_committed, leader epoch to first and last latest offset.
    shown: dict[bool, dict[int, tuple[int, int]]] = field(default_factory=lambda: {False: {}, True: {}})
    decided: Mapping[tuple[int, int], bool] = field(default_factory=dict)  # producer id and epoch to committed

    def check(self, cluster: Cluster) -> None:
        for node in cluster.nodes.values():
            self._check_names(node)
            if node.replica is not None:
                self._check_replica(node, node.replica)
                self._check_committed(node, node.replica)
                self._check_isolation(node, node.replica)
                self._check_shown(node.replica)
        self._check_latest_never_falls()
        self._check_acknowledged(cluster)

    def _check_names(self, node: Node) -> None:
        """Epoch and offset name one batch, on every disk and at all times."""
        for entry in node.log.entries:
            value = self.named.setdefault((entry.info.leader_epoch, entry.base_offset), entry.value)
            require(value == entry.value, f"epoch {entry.info.leader_epoch}, offset {entry.base_offset}: two batches")

    def _check_replica(self, node: Node, replica: Replica) -> None:
        log = node.log
        require(replica.log_end_offset == log.log_end_offset, f"broker {node.id}: the log ends elsewhere")
        require(replica.log_start_offset == log.log_start_offset, f"broker {node.id}: the log starts elsewhere")
        ordered = replica.log_start_offset <= replica.high_watermark <= replica.log_end_offset
        require(ordered, f"broker {node.id}: the high watermark is outside the log")
        self._check_high_watermark(node, replica)
        self._check_producers(node, replica)
        for entry in log.entries:
            offset = max(entry.base_offset, replica.log_start_offset)
            epoch = replica.epochs.epoch_at(offset)
            require(epoch == entry.info.leader_epoch, f"broker {node.id}: epoch history differs at {offset}")
        require(log.epochs() == replica.epochs.truncate_to(log.log_end_offset), f"broker {node.id}: epochs on disk")

    @staticmethod
    def _check_producers(node: Node, replica: Replica) -> None:
        """Known bug 19. A replica that forgot idle producers lacks only those."""
        rebuilt = node.log.expected_producers()
        if node.forgot:
            remembered = dict(rebuilt.entries())
            producer_ids = {producer_id for producer_id, _ in replica.producers.entries()}
            for producer_id, _ in replica.producers.transactions.ongoing():
                require(producer_id in producer_ids, f"broker {node.id}: forgot {producer_id} in its transaction")
            for producer_id, entry in replica.producers.entries():
                whole = remembered.get(producer_id)
                same = whole is not None and (whole.producer_epoch, whole.last_append_ms) == (
                    entry.producer_epoch,
                    entry.last_append_ms,
                )
                require(same, f"broker {node.id}: producer {producer_id} differs from the log")
            transactions = replica.producers.transactions == rebuilt.transactions
            require(transactions, f"broker {node.id}: transactions differ from the log")
        else:
            require(replica.producers == rebuilt, f"broker {node.id}: producers differ from the log")

    def _check_isolation(self, node: Node, replica: Replica) -> None:
        """Readers of committed records see every batch of a committed transaction, and no batch of others."""
        stable, transactions = replica.last_stable_offset, replica.producers.transactions
        require(replica.log_start_offset <= stable <= replica.high_watermark, f"broker {node.id}: LSO {stable}")
        key = (node.id, node.run)
        anew = replica.role is Role.FOLLOWER and replica.high_watermark == replica.log_start_offset
        require(stable >= self.stable.get(key, 0) or anew, f"broker {node.id}: the last stable offset fell")
        self.stable[key] = stable
        for entry in node.log.entries:
            info = entry.info
            if info.next_offset > stable:
                break
            if info.transactional and not info.control:
                committed = self.decided.get((info.producer_id, info.producer_epoch))
                require(committed is not None, f"broker {node.id}: the undecided batch {entry.value} is shown")
                aborted = transactions.is_aborted(info.producer_id, info.base_offset)
                require(aborted != committed, f"broker {node.id}: {entry.value} is shown: {not aborted}")

    def _check_high_watermark(self, node: Node, replica: Replica) -> None:
        """It never falls while the process lives, except where the log was rebuilt."""
        key = (node.id, node.run)
        before = self.high_watermarks.get(key, 0)
        anew = replica.role is Role.FOLLOWER and replica.high_watermark == replica.log_start_offset
        require(replica.high_watermark >= before or anew, f"broker {node.id}: the high watermark fell")
        self.high_watermarks[key] = replica.high_watermark

    def _check_committed(self, node: Node, replica: Replica) -> None:
        """Known bug 13: below the high watermark, all replicas have the same batches for ever."""
        for entry in node.log.entries:
            if entry.info.next_offset <= replica.high_watermark:
                committed = self.committed.setdefault(entry.base_offset, entry)
                require(committed == entry, f"broker {node.id}: committed records at {entry.base_offset} differ")

    def _check_shown(self, replica: Replica) -> None:
        if replica.role is not Role.LEADER:
            return
        epoch = replica.assignment.leader_epoch
        for read_committed, shown in self.shown.items():
            try:
                latest = replica.latest_offset(epoch, read_committed=read_committed)
            except OffsetNotAvailableError:
                return
            first, _ = shown.get(epoch, (latest, latest))
            shown[epoch] = (first, latest)

    def _check_latest_never_falls(self) -> None:
        """KIP-207: clients only go to newer leaders, and none of these shows less than an older one did."""
        for shown in self.shown.values():
            for (_, last), (first, _) in pairwise(shown[epoch] for epoch in sorted(shown)):
                require(last <= first, f"the latest offset fell from {last} to {first}")

    @staticmethod
    def _check_acknowledged(cluster: Cluster) -> None:
        """Every electable replica has all acknowledged batches, at the offsets that clients were given."""
        for broker in cluster.controller.eligible:
            node = cluster.nodes[broker]
            if node.data_lost:
                continue
            stored = {entry.value: entry.base_offset for entry in node.log.entries}
            for value, offset in cluster.acknowledged.items():
                kept = stored.get(value) == offset or offset < node.log.log_start_offset
                require(kept, f"broker {broker} is electable without the acknowledged batch {value} at {offset}")


def check_healed(cluster: Cluster) -> None:
    """When all brokers are back and all messages have arrived, the replicas are equal and complete."""
    logs = [node.log for node in cluster.nodes.values()]
    start = max(log.log_start_offset for log in logs)
    contents = [[entry for entry in log.entries if entry.info.next_offset > start] for log in logs]
    require(all(content == contents[0] for content in contents), "the replicas differ after everything has healed")
    for broker in cluster.nodes:
        replica = cluster.replica(broker)
        require(replica.high_watermark == logs[0].log_end_offset, f"broker {broker}: not everything is committed")
    require(set(cluster.controller.assignment.isr) == set(cluster.nodes), "the ISR is not complete")
    seen: set[int] = set()
    for entry in contents[0]:
        require(entry.value not in seen, f"the batch {entry.value} is stored twice")
        seen.add(entry.value)
