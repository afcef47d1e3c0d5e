"""The controller's log: one line for each change of state, with who, what, which epoch and why."""

from __future__ import annotations

from spark_broker.controller.controller import Controller
from spark_broker.controller.effects import Note
from spark_broker.controller.events import ControllerStarted
from spark_broker.protocol.messages import AlterIsr, AlterPartition, IsrMember
from tests.unit.controller.cluster import Cluster, settings
from tests.unit.controller.stories import come_back, damage, lose

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
    """The leader's request for this ISR of all partitions that it leads."""
    members = [IsrMember(broker, cluster.image.brokers[broker].epoch) for broker in isr]
    changes = [
        AlterIsr(topic.topic_id, number, state.leader_epoch, state.partition_epoch, members)
        for topic, number, state in cluster.image.partitions()
        if state.leader == leader
    ]
    cluster.call(AlterPartition(leader, cluster.image.brokers[leader].epoch, changes))


def test_an_election_says_who_leads_in_which_epoch_and_why() -> None:
    cluster = three_brokers()
    lose(cluster, 0)
    assert cluster.notes == [
        FENCED_0,
        "t-0: broker 1 leads in leader epoch 1 (was broker 0), ISR 1, 2: broker 0 of launch 1 is fenced",
    ]


def test_a_fenced_broker_that_led_hundreds_is_a_line_of_each_kind() -> None:
    cluster = three_brokers(partitions=1000)
    lose(cluster, 0)
    assert cluster.notes == [FENCED_0, LED, FOLLOWED]


def test_a_partition_that_nobody_can_lead_and_its_return() -> None:
    cluster = three_brokers()
    lose(cluster, 0)
    lose(cluster, 1)
    cluster.notes.clear()
    lose(cluster, 2)
    come_back(cluster, 2)
    assert cluster.notes[1:] == [
        "t-0: nobody leads in leader epoch 3 (was broker 2), ISR 2: broker 2 of launch 3 is fenced",
        "broker 2 of launch 4 registered (process_crash start), broker epoch 21",
        "broker 2 of launch 4 is live: it may lead and join ISRs",
        "t-0: broker 2 leads in leader epoch 4 (was nobody), ISR 2: broker 2 of launch 4 is live",
    ]


def test_a_request_for_isr_changes_is_one_line() -> None:
    cluster = three_brokers(partitions=12)
    alter(cluster, 1, 1, 2)
    assert cluster.notes == [PROPOSED]


def test_an_isr_change_of_one_partition_names_both_isrs() -> None:
    cluster = three_brokers()
    alter(cluster, 0, 0, 2)
    alter(cluster, 0, 0, 1, 2)
    assert cluster.notes == [
        "t-0: ISR 0, 2 (was 0, 1, 2) in leader epoch 0: proposed by broker 0, which leads",
        "t-0: ISR 0, 1, 2 (was 0, 2) in leader epoch 0: proposed by broker 0, which leads",
    ]


def test_damage_that_was_set_aside_ends_the_epoch() -> None:
    cluster = three_brokers()
    damage(cluster, 2, [(cluster.topic().topic_id, 0)])
    assert cluster.notes == [
        "t-0: broker 0 leads on in leader epoch 1, ISR 0, 1: broker 2 has set damaged replicas aside",
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
    assert outcome.effects == (
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
        "t-0: broker 1 leads in leader epoch 1 (was broker 0), ISR 1, 2: broker 0 of launch 1 leaves in order",
    ]
