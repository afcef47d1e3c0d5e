"""The controller's log: one line for each change of state, with who, what, which epoch and why."""

from __future__ import annotations

from spark_broker.controller.controller import Controller
from spark_broker.controller.effects import Note
from spark_broker.controller.events import ControllerStarted
from spark_broker.controller.partition_line import PartitionChanged
from spark_broker.protocol.messages import (
    AlterIsr,
    AlterPartitionRequest,
    AlterTopicConfigRequest,
    CreatePartitionsRequest,
    DeleteTopicRequest,
    IsrMember,
)
from tests.unit.controller.cluster import Cluster, registration, settings
from tests.unit.controller.stories import come_back, damage, lose

ENDED_0 = "session 2 of broker 0 ends: its stream ended"
FENCED_0 = "fenced broker 0 of launch 1: its stream ended and its port refuses connections"
LED = (
    "334 partitions have new leaders: 167 on broker 1, 167 on broker 2 "
    "(t-0 epoch 1, t-3 epoch 1, t-6 epoch 1, ...): broker 0 of launch 1 is fenced"
)
FOLLOWED = (
    "666 partitions have another ISR: broker 0 leaves 666 "
    "(t-1 epoch 0, t-2 epoch 0, t-4 epoch 0, ...): broker 0 of launch 1 is fenced"
)
PROPOSED = (
    "4 partitions have another ISR: broker 0 leaves 4 "
    "(t-1 epoch 0, t-4 epoch 0, t-7 epoch 0, ...): proposed by broker 1, which leads"
)


def three_brokers(partitions: int = 1, **config: str) -> Cluster:
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic(partitions=partitions, config={name.replace("_", "."): v for name, v in config.items()})
    cluster.notes.clear()
    return cluster


def alter(cluster: Cluster, leader: int, *isr: int) -> None:
    """The leader proposes this ISR for all partitions that it leads."""
    members = [IsrMember(broker, cluster.image.brokers[broker].epoch) for broker in isr]
    changes = [
        AlterIsr(topic.topic_id, number, state.leader_epoch, state.partition_epoch, members)
        for topic, number, state in cluster.image.partitions()
        if state.leader == leader
    ]
    cluster.call(AlterPartitionRequest(leader, cluster.image.brokers[leader].epoch, changes))


def test_an_election_says_who_leads_in_which_epoch_and_why() -> None:
    cluster = three_brokers()
    lose(cluster, 0)
    assert cluster.notes == [
        ENDED_0,
        FENCED_0,
        (
            "t-0: leader 0 -> 1, leader epoch 0 -> 1, ISR [0, 1, 2] -> [1, 2], partition epoch 0 -> 1: "
            "broker 0 of launch 1 is fenced"
        ),
    ]


def test_a_fenced_broker_that_led_hundreds_is_a_line_of_each_kind_and_one_of_each_partition() -> None:
    cluster = three_brokers(partitions=1000)
    lose(cluster, 0)
    in_sum = [note for note in cluster.notes if not note.startswith("t-")]
    assert in_sum == [ENDED_0, FENCED_0, LED, FOLLOWED]
    each = [note.split(":")[0] for note in cluster.notes if note.startswith("t-")]
    assert sorted(each) == sorted(f"t-{number}" for number in range(1000))


def test_a_partition_that_nobody_can_lead_and_its_return() -> None:
    cluster = three_brokers()
    lose(cluster, 0)
    lose(cluster, 1)
    cluster.notes.clear()
    lose(cluster, 2)
    come_back(cluster, 2)
    assert cluster.notes[1:] == [
        "fenced broker 2 of launch 3: its stream ended and its port refuses connections",
        "t-0: leader 2 -> none, leader epoch 2 -> 3, ISR [2], partition epoch 2 -> 3: broker 2 of launch 3 is fenced",
        "broker 2 of launch 4 registered (process_crash start), broker epoch 21: session 9 begins",
        "broker 2 of launch 4 is live: it may lead and join ISRs",
        "t-0: leader none -> 2, leader epoch 3 -> 4, ISR [2], partition epoch 3 -> 4: broker 2 of launch 4 is live",
    ]


def test_a_request_for_isr_changes_is_one_line_and_one_of_each_partition() -> None:
    cluster = three_brokers(partitions=12)
    alter(cluster, 1, 1, 2)
    assert cluster.notes[0] == PROPOSED
    assert [note.split(":")[0] for note in cluster.notes[1:]] == ["t-1", "t-4", "t-7", "t-10"]
    for note in cluster.notes[1:]:
        assert "-> [1, 2], partition epoch 0 -> 1: proposed by broker 1, which leads" in note


def test_an_isr_change_of_one_partition_names_both_isrs() -> None:
    cluster = three_brokers()
    alter(cluster, 0, 0, 2)
    alter(cluster, 0, 0, 1, 2)
    assert cluster.notes == [
        (
            "t-0: leader 0, leader epoch 0, ISR [0, 1, 2] -> [0, 2], partition epoch 0 -> 1: "
            "proposed by broker 0, which leads"
        ),
        (
            "t-0: leader 0, leader epoch 0, ISR [0, 2] -> [0, 1, 2], partition epoch 1 -> 2: "
            "proposed by broker 0, which leads"
        ),
    ]


def test_damage_that_was_set_aside_ends_the_epoch() -> None:
    cluster = three_brokers()
    damage(cluster, 2, [(cluster.topic().topic_id, 0)])
    assert cluster.notes == [
        (
            "t-0: leader 0, leader epoch 0 -> 1, ISR [0, 1, 2] -> [0, 1], partition epoch 0 -> 1: "
            "broker 2 has set damaged replicas aside"
        ),
    ]


def test_a_controller_that_takes_over_says_after_whom() -> None:
    cluster = three_brokers(partitions=2)
    for host, pid in (("host-a", 7), ("host-b", 8)):
        cluster.notes.clear()
        cluster.handle(ControllerStarted("v" * 32, "", host, pid, 0))
    assert cluster.notes == ["controller epoch 2 begins: pid 8 on host host-b (epoch 1 was pid 7 on host host-a)"]


def test_a_cluster_that_starts_again_has_no_leaders_at_first_which_is_expected() -> None:
    cluster = three_brokers(partitions=3)
    controller = Controller(cluster.image, settings())
    outcome = controller.handle(ControllerStarted("v" * 32, "", "host-a", 7, 0), 0)
    lines = tuple(effect for effect in outcome.effects if isinstance(effect, Note))
    each = [effect for effect in outcome.effects if isinstance(effect, PartitionChanged)]
    assert [(line.topic_partition, line.expected) for line in each] == [(f"t-{number}", True) for number in range(3)]
    assert lines == (
        Note("controller epoch 1 begins: pid 7 on host host-a", expected=True),
        Note(
            "3 partitions have no leader (t-0 epoch 1, t-1 epoch 1, t-2 epoch 1): "
            "every broker registers anew in controller epoch 1",
            expected=True,
        ),
    )


def test_a_controlled_shutdown_is_said_once() -> None:
    cluster = three_brokers()
    for _ in range(3):
        cluster.beat(0, wants_shutdown=True)
    assert cluster.notes == [
        "broker 0 of launch 1 hands over and leaves in order",
        (
            "t-0: leader 0 -> 1, leader epoch 0 -> 1, ISR [0, 1, 2] -> [1, 2], partition epoch 0 -> 1: "
            "broker 0 of launch 1 leaves in order"
        ),
    ]


def test_who_is_eligible_is_in_the_line() -> None:
    cluster = three_brokers(min_insync_replicas="2")
    lose(cluster, 0)
    lose(cluster, 1)
    assert cluster.notes[-1].startswith("t-0: leader 1 -> 2, leader epoch 1 -> 2, ISR [1, 2] -> [2], ELR [] -> [1], ")


def test_a_line_has_what_changed_as_fields_for_machines() -> None:
    cluster = three_brokers()
    before = cluster.topic().partitions[0]
    lose(cluster, 0)
    after = cluster.topic().partitions[0]
    assert PartitionChanged("t-0", before, after, "why").fields == {
        "topic_partition": "t-0",
        "why": "why",
        "leader": 1,
        "old_leader": 0,
        "leader_epoch": 1,
        "old_leader_epoch": 0,
        "isr": (1, 2),
        "old_isr": (0, 1, 2),
        "partition_epoch": 1,
        "old_partition_epoch": 0,
    }


def test_a_topic_that_is_created_grown_changed_and_deleted_is_a_line_each() -> None:
    cluster = three_brokers()
    topic = cluster.topic().topic_id
    cluster.call(CreatePartitionsRequest("t", 2))
    cluster.call(AlterTopicConfigRequest("t", {"retention.ms": "5000"}))
    cluster.call(DeleteTopicRequest("t"))
    cluster.create_topic()
    again = cluster.topic().topic_id
    assert cluster.notes == [
        f"topic t ({topic}) has 2 partitions (was 1)",
        "t-1: created: leader 1, leader epoch 0, ISR [1, 2, 0], replicas [1, 2, 0]: asked for",
        f"topic t ({topic}) has settings retention.ms=5000 (was none)",
        f"topic t ({topic}) is deleted",
        f"topic t ({again}) is created with 1 partitions",
        "t-0: created: leader 0, leader epoch 0, ISR [0, 1, 2], replicas [0, 1, 2]: asked for",
    ]


def test_a_session_that_another_replaces_and_one_that_comes_back_are_lines() -> None:
    cluster = three_brokers()
    again = registration(1, "directory-0", broker_id=0)
    cluster.register(again)
    cluster.end_session(0)
    cluster.register(again)
    resumed = "broker 0 of launch 1 resumed its session, broker epoch 3: session"
    assert cluster.notes == [
        "session 2 of broker 0 ends: session 8 replaces it",
        f"{resumed} 8 begins",
        "session 8 of broker 0 ends: its stream ended",
        f"{resumed} 9 begins",
    ]
