"""Groups of real consumers on real broker processes: members share, hand over, die, and come back."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, RebalanceListener, TopicPartition
from spark_broker.errors import (
    InvalidConfigError,
    InvalidRegularExpressionError,
    InvalidSubscriptionError,
    PolicyViolationError,
    ReentrantCallError,
    SparkBrokerError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.murmur2 import group_partition
from tests.conftest import WaitUntil
from tests.support.process_cluster import ProcessCluster

SESSION_MS = 3000


@pytest.fixture(scope="module")
def admin(process_cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(process_cluster.bootstrap_servers) as admin:
        yield admin


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of the topic and of the group."""
    text: str = request.node.name
    return text.removeprefix("test_")[:60]


@pytest.fixture
def topic(admin: Admin, name: str) -> str:
    admin.create_topic(NewTopic(name, partitions=4, replication_factor=3))
    return name


class Member(RebalanceListener):
    """A consumer with its thread, which polls until `stop`."""

    def __init__(self, servers: str, group: str, pattern: str | None = None, **settings: object) -> None:
        names = {name.replace("_", "."): value for name, value in settings.items()}
        self.read: list[tuple[int, int, bytes]] = []
        self.events: list[tuple[str, tuple[int, ...]]] = []
        self.owned: set[int] = set()
        self.error: BaseException | None = None
        self.polls = threading.Event()
        self.polls.set()
        self._stopped = False
        self.consumer = Consumer(
            servers,
            topics=None if pattern else [group],
            pattern=pattern,
            listener=self,
            config={"session.timeout.ms": SESSION_MS, "auto.offset.reset": "earliest", "group.id": group, **names},
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped:
                for batch in self.consumer.poll(0.2):
                    values = batch.data["value"].to_pylist()
                    self.read += [(batch.partition, batch.base_offset + at, v) for at, v in enumerate(values)]
                self.polls.wait()
        except BaseException as error:  # noqa: BLE001
            self.error = error

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self._note("assigned", partitions)
        self.owned |= {tp.partition for tp in partitions}

    def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        self._note("revoked", partitions)
        self.owned -= {tp.partition for tp in partitions}

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        self._note("lost", partitions)
        self.owned -= {tp.partition for tp in partitions}

    def _note(self, what: str, partitions: Sequence[TopicPartition]) -> None:
        self.events.append((what, tuple(tp.partition for tp in partitions)))

    def stop(self) -> None:
        self._stopped = True
        self._thread.join(20)
        self.consumer.close()

    def die(self) -> None:
        """Without a word to the group."""
        self._stopped = True
        self._thread.join(20)
        self.consumer._threads.close()

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def produce(servers: str, topic: str, count: int, first: int = 0, partitions: int = 4) -> list[bytes]:
    values = [b"%d" % number for number in range(first, first + count)]
    with Producer(servers) as producer:
        for number, value in enumerate(values):
            producer.send(topic, value, partition=number % partitions)
        producer.flush()
    return values


def shares(*members: Member) -> bool:
    """Whether everything is shared evenly."""
    owned = [number for member in members for number in member.owned]
    return sorted(owned) == [0, 1, 2, 3] and max(len(m.owned) for m in members) - min(len(m.owned) for m in members) < 2


def values_of(*members: Member) -> Counter[bytes]:
    return Counter(value for member in members for _, _, value in member.read)


def test_members_share_and_every_record_is_handed_out_once(
    process_cluster: ProcessCluster, topic: str, wait_until: WaitUntil
) -> None:
    servers = process_cluster.bootstrap_servers
    with Member(servers, topic) as first:
        wait_until(lambda: shares(first), "the only member to get everything")
        values = produce(servers, topic, 40)
        wait_until(lambda: len(first.read) == 40, "its records")
        with Member(servers, topic) as second:
            wait_until(lambda: shares(first, second), "both to share")
            values += produce(servers, topic, 40, 40)
            wait_until(lambda: len(first.read) + len(second.read) == 80, "the records of both")
            assert second.read, "it reads its share"
        wait_until(lambda: shares(first), "the one that stays to get everything")
        values += produce(servers, topic, 40, 80)
        wait_until(lambda: len(first.read) + len(second.read) == 120, "all records")
    assert values_of(first, second) == Counter(values)
    assert (first.error, second.error) == (None, None)
    assert [kind for kind, _ in second.events] == ["assigned", "revoked"]
    assert all(kind != "lost" for kind, _ in first.events)


def test_partitions_of_a_member_that_dies_are_read_by_others(
    process_cluster: ProcessCluster, topic: str, wait_until: WaitUntil
) -> None:
    servers = process_cluster.bootstrap_servers
    with Member(servers, topic) as first, Member(servers, topic) as second:
        wait_until(lambda: shares(first, second), "both to share")
        second.die()
        values = produce(servers, topic, 40)
        wait_until(lambda: values_of(first) == Counter(values), "the records of the dead one")


def test_a_group_goes_on_when_its_coordinator_dies(
    process_cluster: ProcessCluster, admin: Admin, topic: str, wait_until: WaitUntil
) -> None:
    servers = process_cluster.bootstrap_servers
    with Member(servers, topic) as first, Member(servers, topic) as second:
        wait_until(lambda: shares(first, second), "both to share")
        before = len(first.events), len(second.events)
        offsets = admin.describe_topic(CONSUMER_OFFSETS_TOPIC)
        leader = offsets.partitions[group_partition(topic, len(offsets.partitions))].leader
        pid = next(broker.pid for broker in admin.describe_cluster().brokers if broker.id == leader)
        slot = next(slot for slot in range(4) if process_cluster.pid(slot) == pid)
        os.kill(process_cluster.pid(slot), signal.SIGKILL)
        values = produce(servers, topic, 40)
        wait_until(lambda: len(first.read) + len(second.read) >= 40, "the records")
        assert values_of(first, second) == Counter(values)
        assert (len(first.events), len(second.events)) == before, "no partition has moved"
        process_cluster.launch(slot)
        process_cluster.await_live(3)
    with Consumer(servers, group_id=topic) as consumer:
        committed = [consumer.committed(TopicPartition(topic, number)) for number in range(4)]
    assert [each and each.offset for each in committed] == [10, 10, 10, 10]


@pytest.mark.full
def test_a_static_member_that_restarts_moves_no_partition(
    process_cluster: ProcessCluster, topic: str, wait_until: WaitUntil
) -> None:
    servers = process_cluster.bootstrap_servers
    with Member(servers, topic, group_instance_id="a") as first:
        second = Member(servers, topic, group_instance_id="b")
        wait_until(lambda: shares(first, second), "both to share")
        owned, events = set(second.owned), list(first.events)
        second.stop()
        with Member(servers, topic, group_instance_id="b") as third:
            wait_until(lambda: third.owned == owned, "the same partitions")
            assert first.events == events
            with Member(servers, topic, group_instance_id="b") as intruder:
                wait_until(lambda: intruder.error is not None, "the refusal")
                assert isinstance(intruder.error, UnreleasedInstanceIdError)
            assert (third.owned, third.error) == (owned, None)


def test_a_pattern_finds_topics_that_are_created_later(
    process_cluster: ProcessCluster, admin: Admin, name: str, wait_until: WaitUntil
) -> None:
    servers = process_cluster.bootstrap_servers
    with Member(servers, name, pattern=f"{name[:30]}.*-[0-9]+") as member:
        for number in range(2):
            topic = f"{name}-{number}"
            admin.create_topic(NewTopic(topic, partitions=1, replication_factor=1))
            with Producer(servers) as producer:
                producer.send(topic, topic.encode()).result(20)
            wait_until(lambda topic=topic: topic.encode() in values_of(member), topic)  # type: ignore[misc]
        assert member.error is None


def test_who_does_not_poll_loses_its_partitions_and_joins_again(
    process_cluster: ProcessCluster, topic: str, wait_until: WaitUntil
) -> None:
    servers = process_cluster.bootstrap_servers
    with Member(servers, topic) as first, Member(servers, topic, max_poll_interval_ms=1000) as slow:
        wait_until(lambda: shares(first, slow), "both to share")
        slow.polls.clear()
        wait_until(lambda: shares(first), "the one that polls to get everything")
        with pytest.raises(UnknownMemberIdError):
            slow.consumer.commit({TopicPartition(topic, next(iter(slow.owned))): 0})
        slow.polls.set()
        wait_until(lambda: shares(first, slow), "both to share again")
        assert [kind for kind, _ in slow.events if kind == "lost"] == ["lost"]
        assert slow.error is None


def test_a_listener_commits_and_seeks_and_may_not_poll(
    process_cluster: ProcessCluster, topic: str, wait_until: WaitUntil
) -> None:
    servers = process_cluster.bootstrap_servers
    produce(servers, topic, 40)
    told: list[str] = []

    class Listener(RebalanceListener):
        def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
            for tp in partitions:
                consumer.seek(tp, 5)
            for forbidden in (consumer.poll, consumer.unsubscribe):
                with pytest.raises(ReentrantCallError):
                    forbidden()
            told.append("assigned")

        def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
            consumer.commit({tp: consumer.position(tp) for tp in partitions})
            told.append("revoked")

    with Consumer(servers, group_id=topic, auto_offset_reset="earliest", enable_auto_commit=False) as consumer:
        consumer.subscribe([topic], listener=Listener())
        rows: list[int] = []

        def read() -> bool:
            rows.extend(batch.base_offset + at for batch in consumer.poll(0.2) for at in range(batch.data.num_rows))
            return len(rows) == 20

        wait_until(read, "what comes after the seek")
        assert sorted(set(rows)) == [5, 6, 7, 8, 9]
        consumer.unsubscribe()
        assert told == ["assigned", "revoked"]
        assert consumer.assignment() == []
        stored = [consumer.committed(TopicPartition(topic, number)) for number in range(4)]
    assert [each and each.offset for each in stored] == [10, 10, 10, 10]


def test_what_a_listener_raises_is_raised_by_poll(process_cluster: ProcessCluster, topic: str) -> None:
    class Broken(RebalanceListener):
        def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
            raise ValueError("mine")

    with Consumer(process_cluster.bootstrap_servers, group_id=topic, topics=[topic], listener=Broken()) as consumer:
        with pytest.raises(ValueError, match="mine"):
            consumer.poll(20)
        assert len(consumer.assignment()) == 4
        consumer.poll(0)


def test_positions_pauses_and_seeks_of_partitions_that_stay_survive_a_rebalance(
    process_cluster: ProcessCluster, topic: str, wait_until: WaitUntil
) -> None:
    servers = process_cluster.bootstrap_servers
    produce(servers, topic, 40)
    every = [TopicPartition(topic, number) for number in range(4)]
    with Consumer(servers, group_id=topic, topics=[topic], auto_offset_reset="earliest") as consumer:
        for tp in every:
            consumer.seek(tp, 3)
        consumer.pause(*every)
        with Member(servers, topic) as other:

            def is_shared() -> bool:
                assert consumer.poll(0.1) == [], "all is paused"
                return len(other.owned) == 2 and len(consumer.assignment()) == 2

            wait_until(is_shared, "both to share")
            kept = consumer.assignment()
            assert [consumer.position(tp) for tp in kept] == [3, 3]
            assert {tp.partition for tp in kept}.isdisjoint(other.owned)
            wait_until(lambda: len(other.read) == 14, "the rest of what was sought")


def test_whoever_assigns_its_own_partitions_commits_only_while_the_group_has_no_members(
    process_cluster: ProcessCluster, topic: str, wait_until: WaitUntil
) -> None:
    servers, tp = process_cluster.bootstrap_servers, TopicPartition(topic, 0)
    produce(servers, topic, 40)
    with Consumer(servers, group_id=topic, enable_auto_commit=False) as alone:
        alone.assign([tp])
        alone.seek(tp, 2)
        alone.commit()
        with Member(servers, topic) as member:
            wait_until(lambda: shares(member), "the member")
            with pytest.raises(UnknownMemberIdError, match="has members"):
                alone.commit()
            with pytest.raises(PolicyViolationError, match="unsubscribe"):
                member.consumer.assign([tp])


def test_members_of_a_group_iterate(process_cluster: ProcessCluster, topic: str, wait_until: WaitUntil) -> None:
    servers = process_cluster.bootstrap_servers
    values = produce(servers, topic, 40)
    seen: list[bytes] = []
    with Consumer(servers, group_id=topic, topics=[topic], auto_offset_reset="earliest") as consumer:
        for record in consumer:
            assert isinstance(record.value, bytes)
            seen.append(record.value)
            if len(seen) == 25:
                break
    with Member(servers, topic) as member:
        wait_until(lambda: len(member.read) == 15, "the rest")
    assert Counter(seen) + values_of(member) == Counter(values)


@pytest.mark.parametrize(
    ("open_one", "error"),
    [
        (lambda servers: Consumer(servers, pattern="a.*"), InvalidConfigError),
        (lambda servers: Consumer(servers, topics=["t"], listener=RebalanceListener()), InvalidConfigError),
        (lambda servers: Consumer(servers, group_id="g").subscribe(), InvalidSubscriptionError),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(
    process_cluster: ProcessCluster, open_one: Callable[[str], object], error: type[SparkBrokerError]
) -> None:
    with pytest.raises(error):
        open_one(process_cluster.bootstrap_servers)


def test_a_pattern_that_is_refused_is_raised_by_poll(process_cluster: ProcessCluster, name: str) -> None:
    with (
        Consumer(process_cluster.bootstrap_servers, group_id=name, pattern="(a+)+\\1") as consumer,
        pytest.raises(InvalidRegularExpressionError),
    ):
        consumer.poll(20)
