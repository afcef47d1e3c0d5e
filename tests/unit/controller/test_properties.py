"""The invariants of partitions and epochs hold in every order of events, and every replay agrees."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spark_broker.controller.effects import ProbePort
from spark_broker.controller.events import PortProbed, SparkLost
from spark_broker.controller.image import PartitionRegistration
from spark_broker.controller.records import decode_records, encode_records
from spark_broker.controller.snapshot import image_from_snapshot, to_records
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.messages import (
    AlterIsr,
    AlterPartitionRequest,
    AlterTopicConfigRequest,
    CallRequest,
    CreatePartitionsRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    ElectLeadersRequest,
    IsrMember,
    ReassignPartitionRequest,
)
from tests.support.machines import machine_settings
from tests.unit.controller.cluster import Cluster, registration
from tests.unit.controller.copies import Copies

BROKERS = 4
brokers = st.integers(0, BROKERS - 1)


def test_an_unclean_election_counts_even_if_a_clean_change_follows_at_once() -> None:
    """A machine has found it: the new leader's log was held against what the unclean election gave up."""
    machine = ClusterMachine()
    machine.start()
    machine.append_everywhere()
    for broker in (0, 1):
        machine.move([broker], 0)
    machine.new_process(0, "machine_crash")
    machine.pass_time(1)
    topic = machine.cluster.image.topic("a")
    assert topic is not None
    assert topic.partitions[0].leader_epoch > topic.partitions[0].unclean_epoch > 0
    machine.whoever_is_electable_has_everything_that_was_committed()


class ClusterMachine(RuleBasedStateMachine):
    """Brokers come, go, catch up and stop; topics and replicas move; the driver restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(replica_reassignment_delay_ms=2000)
        self.seen: dict[tuple[str, int], PartitionRegistration] = {}
        self.controller_epoch = -1
        self.copies = Copies()

    @initialize()
    def start(self) -> None:
        self.cluster.start_brokers(BROKERS)
        self.cluster.create_topic("a", 3, 3, {"min.insync.replicas": "2"})
        self.cluster.create_topic("b", 2, 2)

    def connected(self, broker: int) -> bool:
        return broker in self.cluster.controller.sessions.connected

    @rule(broker=brokers, refused=st.booleans())
    def end_session(self, broker: int, refused: bool) -> None:
        for effect in self.cluster.end_session(broker):
            if isinstance(effect, ProbePort):
                self.cluster.handle(PortProbed(effect.broker_id, effect.session_id, refused))

    @rule(broker=brokers)
    def spark_loss(self, broker: int) -> None:
        self.cluster.handle(SparkLost(self.cluster.image.brokers[broker].launch))

    @rule(broker=brokers, kind=st.sampled_from(["clean", "process_crash", "machine_crash"]))
    def new_process(self, broker: int, kind: str) -> None:
        directory = self.cluster.image.brokers[broker].directory_id
        if kind == "machine_crash":
            self.copies.crash(broker)
        request = registration(self.cluster.new_launch(), directory, broker_id=broker, start_kind=kind)
        self.cluster.register(request)

    @rule(
        broker=brokers,
        wants_shutdown=st.booleans(),
        full=st.sampled_from([False, False, True]),
        offline=st.sampled_from([(), (), (("a", 0),), (("a", 1), ("b", 0)), (("gone", 3),)]),
    )
    def heartbeat(self, broker: int, wants_shutdown: bool, full: bool, offline: tuple[tuple[str, int], ...]) -> None:
        self.cluster.logs = self.copies.ends(self.cluster.image)
        before = set(self.cluster.full), dict(self.cluster.offline)
        topics = {topic.name: topic.topic_id for topic in self.cluster.image.topics.values()}
        self.cluster.offline[broker] = {(topics.get(name, name), number) for name, number in offline}
        if self.cluster.beat(broker, wants_shutdown=wants_shutdown, full=full) is None:
            self.cluster.full, self.cluster.offline = before
            return
        if full:
            self.leads_only_what_nobody_with_room_can_lead(broker)
        for key in self.cluster.offline[broker]:
            state = self.cluster.image.partition(*key)
            assert state is None or state.leader != broker

    def leads_only_what_nobody_with_room_can_lead(self, full: int) -> None:
        """As far as the controller knows: another broker's heartbeat may later report a change."""
        image = self.cluster.image
        disks = self.cluster.controller.disks
        for topic, number, state in image.partitions():
            may_lead = disks.electable(image, (topic.topic_id, number), without=disks.full)
            assert state.leader != full or not any(map(may_lead, state.isr))

    @rule(ms=st.integers(0, 12_000))
    def pass_time(self, ms: int) -> None:
        self.cluster.logs = self.copies.ends(self.cluster.image)
        self.cluster.pass_time(ms, alive=[b for b in range(BROKERS) if self.connected(b)])

    @rule()
    def empty_directory_registers(self) -> None:
        if len(self.cluster.image.brokers) < 2 * BROKERS:
            launch = self.cluster.new_launch()
            self.cluster.register(registration(launch, f"extra-{launch}"))

    @rule(data=st.data())
    def alter_isr(self, data: st.DataObject) -> None:
        topic = self.cluster.image.topic("a")
        if topic is None:
            return
        number = data.draw(st.integers(0, len(topic.partitions) - 1))
        state = topic.partitions[number]
        if state.leader == -1:
            return
        others = data.draw(st.sets(st.sampled_from(state.replicas)))
        older = data.draw(st.sampled_from([0, 0, 0, 1]))  # the leader does not know of new incarnations
        members = [
            IsrMember(b, self.cluster.image.brokers[b].epoch - (older and b not in state.isr))
            for b in sorted({state.leader, *others})
        ]
        epochs = (state.leader_epoch, state.partition_epoch - data.draw(st.sampled_from([0, 0, 0, 1])))
        change = AlterIsr(topic.topic_id, number, *epochs, members)
        leader = self.cluster.image.brokers[state.leader]
        if not older:
            self.copies.catch_up(topic.topic_id, number, state.leader, others - set(state.isr))
        self.call(AlterPartitionRequest(leader.id, leader.epoch, [change]))

    @rule(data=st.data())
    def propose_who_is_back_from_a_crash(self, data: st.DataObject) -> None:
        """The leader counts what the follower had fetched before its machine crashed, and has not heard of that."""
        topic = self.cluster.image.topic("a")
        if topic is None:
            return
        number = data.draw(st.integers(0, len(topic.partitions) - 1))
        follower = data.draw(st.sampled_from(topic.partitions[number].replicas))
        self.append_everywhere()
        self.new_process(follower, "machine_crash")
        self.heartbeat(follower, wants_shutdown=False, full=False, offline=())
        state = self.cluster.image.topics[topic.topic_id].partitions[number]
        if state.leader in (-1, follower):
            return
        leader, members = self.cluster.image.brokers[state.leader], []
        for broker in sorted({*state.isr, follower}):
            epoch = self.cluster.image.brokers[broker].epoch
            members.append(IsrMember(broker, epoch - 1 if broker == follower else epoch))
        change = AlterIsr(topic.topic_id, number, state.leader_epoch, state.partition_epoch, members)
        self.call(AlterPartitionRequest(leader.id, leader.epoch, [change]))

    @rule()
    def append_everywhere(self) -> None:
        """A record is committed where the ISR has the minimum; elsewhere only the leader has it."""
        for topic, number, state in self.cluster.image.partitions():
            if state.leader != -1:
                minimum = min(int(topic.config.get("min.insync.replicas", "1")), len(state.replicas))
                self.copies.append(topic.topic_id, number, state, committed=len(state.isr) >= minimum)

    @rule(minimum=st.sampled_from(["1", "2", "3"]))
    def change_the_minimum(self, minimum: str) -> None:
        self.call(AlterTopicConfigRequest("a", {"min.insync.replicas": minimum}))

    @rule(replicas=st.lists(brokers, min_size=1, max_size=3, unique=True), number=st.integers(0, 2))
    def move(self, replicas: list[int], number: int) -> None:
        self.call(ReassignPartitionRequest("a", number, replicas))

    @rule(
        request=st.sampled_from(
            [ElectLeadersRequest(), DeleteTopicRequest("b"), CreateTopicRequest("b", 2, 2, b"", {})]
        )
    )
    def administer(self, request: CallRequest) -> None:
        self.call(request)

    @rule(total=st.integers(1, 6))
    def grow(self, total: int) -> None:
        self.call(CreatePartitionsRequest("a", total))

    @rule()
    def restart_the_driver(self) -> None:
        now_ms = self.cluster.now_ms
        sessions, unclean, ids = self.cluster.session_of, self.cluster.unclean, self.cluster.ids
        self.cluster = Cluster(self.cluster.image, replica_reassignment_delay_ms=2000)
        self.cluster.now_ms = now_ms
        self.cluster.ids = ids  # A topic that is created again has another id.
        self.cluster.session_of = dict.fromkeys(sessions, -1)
        self.cluster.unclean = unclean

    def call(self, request: CallRequest) -> None:
        before = self.cluster.image
        try:
            self.cluster.call(request)
        except SparkBrokerError:
            assert self.cluster.image == before

    @invariant()
    def epochs_only_rise_and_every_election_has_its_own(self) -> None:
        image = self.cluster.image
        assert image.controller_epoch >= self.controller_epoch
        self.controller_epoch = image.controller_epoch
        for topic, number, state in image.partitions():
            before = self.seen.get((topic.topic_id, number))
            self.seen[topic.topic_id, number] = state
            if before is not None:
                assert state.leader_epoch >= before.leader_epoch
                assert state.partition_epoch >= before.partition_epoch
                assert (state == before) == (state.partition_epoch == before.partition_epoch)
                if state.leader != before.leader:
                    assert state.leader_epoch > before.leader_epoch

    @invariant()
    def every_isr_is_a_part_of_the_replicas_and_has_its_leader(self) -> None:
        for _, _, state in self.cluster.image.partitions():
            assert set(state.isr) <= set(state.replicas)
            assert len(set(state.replicas)) == len(state.replicas)
            assert set(state.adding) <= set(state.replicas)
            assert set(state.removing) <= set(state.replicas)
            assert state.leader == -1 or state.leader in state.isr

    @invariant()
    def nobody_is_eligible_beside_an_isr_that_has_the_minimum(self) -> None:
        for topic, _, state in self.cluster.image.partitions():
            assert set(state.isr).isdisjoint(state.elr)
            minimum = min(int(topic.config.get("min.insync.replicas", "1")), len(state.replicas))
            if len(state.isr) >= minimum:
                assert (state.elr, state.last_known_elr, state.damaged) == ((), (), ())

    @invariant()
    def whoever_is_electable_has_everything_that_was_committed(self) -> None:
        for topic, number, state in self.cluster.image.partitions():
            unclean = {epoch for *key, epoch in self.cluster.unclean if key == [topic.topic_id, number]}
            self.copies.check(topic.topic_id, number, state, unclean)

    @invariant()
    def only_unfenced_brokers_lead_and_whoever_can_lead_does(self) -> None:
        image, disks = self.cluster.image, self.cluster.controller.disks
        for topic, number, state in image.partitions():
            key = (topic.topic_id, number)
            if state.leader != -1:
                assert not image.brokers[state.leader].fenced
            elif any(map(disks.electable(image, key), (*state.isr, *state.elr))):
                # A starting cluster waits for the preferred member; test_cold_start checks for how long.
                members = [broker for broker in state.replicas if broker in (state.isr or state.elr)]
                usable = [broker for broker in members if not disks.is_offline(broker, key)]
                assert usable, "an eligible replica could lead"
                assert not image.is_live(min(usable, key=disks.full.__contains__))

    @invariant()
    def a_snapshot_rebuilds_the_image(self) -> None:
        image = self.cluster.image
        records = decode_records(encode_records(to_records(image)))
        assert image_from_snapshot(records, image.next_offset) == image


# It has long: many stories, on a busy machine.
TestClusterMachine = pytest.mark.slow(pytest.mark.timeout(600)(ClusterMachine.TestCase))
TestClusterMachine.settings = machine_settings(50)
