"""Who leads when a controller starts and the brokers come back one after the other."""

from __future__ import annotations

from collections import Counter

from spark_broker.controller.fencing import OTHERS_COME_MS
from spark_broker.controller.housekeeping import FIRST_BALANCE_MS
from tests.unit.controller.cluster import Cluster
from tests.unit.controller.stories import come_back, lose, register_again, restarted

PARTITIONS = 30


def stopped_cluster(**values: object) -> Cluster:
    """Three brokers, each the leader of ten partitions. Their controller has restarted, and no broker is back yet."""
    cluster = Cluster(**values)  # type: ignore[arg-type]
    cluster.start_brokers(3)
    cluster.create_topic(partitions=PARTITIONS)
    return restarted(cluster, **values)


def led(cluster: Cluster) -> dict[int, int]:
    """How many partitions each broker leads; -1 counts those without a leader."""
    return dict(Counter(p.leader for p in cluster.topic().partitions))


def test_leaders_are_spread_over_brokers_that_come_back_one_after_the_other() -> None:
    cluster = stopped_cluster()
    for count, broker in enumerate((1, 0, 2), start=1):
        come_back(cluster, broker)
        cluster.tick(500)
        assert led(cluster).get(-1, 0) == PARTITIONS - 10 * count
    assert led(cluster) == {0: 10, 1: 10, 2: 10}
    assert all(p.leader_epoch == 2 for p in cluster.topic().partitions)  # fenced, then elected once


def test_the_first_broker_leads_its_own_partitions_at_once() -> None:
    cluster = stopped_cluster()
    come_back(cluster, 2)
    assert led(cluster) == {2: 10, -1: 20}


def test_nobody_is_waited_for_longer_than_others_take_to_come() -> None:
    cluster = stopped_cluster()
    come_back(cluster, 0)
    cluster.tick(OTHERS_COME_MS - 100)
    assert led(cluster) == {0: 10, -1: 20}
    cluster.tick(150)
    assert led(cluster) == {0: PARTITIONS}


def test_a_dead_brokers_partitions_are_led_by_whoever_comes_next() -> None:
    cluster = stopped_cluster()
    come_back(cluster, 0)
    come_back(cluster, 1)
    assert led(cluster) == {0: 10, 1: 10, -1: 10}
    cluster.tick(OTHERS_COME_MS + 50)
    assert -1 not in led(cluster)
    assert 2 not in led(cluster)


def test_the_time_that_others_have_begins_with_the_first_that_serves() -> None:
    """However long the executors take, each broker leads its own partitions."""
    cluster = stopped_cluster()
    cluster.pass_time(60_000)
    come_back(cluster, 0)
    assert led(cluster) == {0: 10, -1: 20}
    come_back(cluster, 1)
    come_back(cluster, 2)
    assert led(cluster) == {0: 10, 1: 10, 2: 10}


def test_a_broker_that_has_registered_and_does_not_serve_yet_leads_nothing() -> None:
    cluster = stopped_cluster()
    register_again(cluster, 0)
    cluster.beat(0, ready=False)
    assert led(cluster) == {-1: PARTITIONS}
    come_back(cluster, 1)
    cluster.beat(0, ready=False)
    assert led(cluster) == {1: 10, -1: 20}
    cluster.beat(0)
    assert led(cluster) == {0: 10, 1: 10, -1: 10}


def test_a_broker_that_comes_late_gets_its_partitions_at_the_first_balance_and_not_with_the_interval() -> None:
    cluster = stopped_cluster(leader_imbalance_check_interval_ms=300_000)
    come_back(cluster, 0)
    come_back(cluster, 1)
    cluster.pass_time(5_000, alive=[0, 1])
    come_back(cluster, 2)
    assert 2 not in led(cluster)
    cluster.pass_time(FIRST_BALANCE_MS - 4_000, alive=[0, 1, 2])
    assert led(cluster) == {0: 10, 1: 10, 2: 10}


def test_nobody_is_waited_for_who_has_left_the_isr_meanwhile() -> None:
    cluster = stopped_cluster()
    come_back(cluster, 0)
    register_again(cluster, 1, "machine_crash")  # It is not ready yet, and is in no ISR any more.
    assert led(cluster) == {0: 15, -1: 15}  # Half of what broker 1 led, the other half waits for broker 2.
    come_back(cluster, 2)
    assert led(cluster) == {0: 15, 2: 15}


def test_nobody_is_waited_for_whose_disk_is_full() -> None:
    cluster = stopped_cluster()
    come_back(cluster, 0)
    register_again(cluster, 1)
    cluster.beat(1, ready=False, full=True)
    assert led(cluster) == {0: 15, -1: 15}  # Half of what broker 1 led, the other half waits for broker 2.


def test_where_others_lead_a_broker_that_is_back_waits_for_nobody() -> None:
    """Only a starting cluster waits. Here broker 2, which has no replica of the partition, has served all the time."""
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic(partitions=1, factor=2)
    cluster.pass_time(OTHERS_COME_MS + 500, alive=[0, 1, 2])
    first, second = cluster.partition().replicas
    lose(cluster, second, first)
    isr = cluster.partition().isr
    assert isr == (first,)
    come_back(cluster, first)
    assert cluster.partition().leader == first
