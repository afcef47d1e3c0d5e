"""Registration: ids belong to directories, newer launches supersede older ones, leadership ends with its process."""

from __future__ import annotations

import msgspec
import pytest

from spark_broker.controller.describe import describe
from spark_broker.controller.effects import CloseSession, Send
from spark_broker.controller.events import SparkLost
from spark_broker.controller.identity import BrokerIdentity, identify
from spark_broker.errors import (
    DuplicateBrokerRegistrationError,
    InconsistentClusterIdError,
    InvalidRequestError,
    SparkBrokerError,
    StaleLaunchError,
    UnsupportedVersionError,
)
from spark_broker.protocol.messages import RegisterBrokerRequest, RegisterBrokerResponse, StopBroker
from tests.unit.controller.cluster import CLUSTER_ID, Cluster, registration


def registered(answer: RegisterBrokerResponse | SparkBrokerError) -> RegisterBrokerResponse:
    assert isinstance(answer, RegisterBrokerResponse), answer
    return answer


def test_new_directories_get_the_smallest_ids_that_were_never_used() -> None:
    cluster = Cluster()
    assert [cluster.start_broker(f"d{i}") for i in range(3)] == [0, 1, 2]


def test_a_registered_directory_keeps_its_id_and_gets_a_higher_epoch() -> None:
    cluster = Cluster()
    cluster.start_brokers(2)
    epoch = cluster.image.brokers[1].epoch
    answer = registered(
        cluster.register(registration(cluster.new_launch(), "directory-1", broker_id=1, cluster_id=CLUSTER_ID))
    )
    assert answer.broker_id == 1
    assert answer.broker_epoch == cluster.image.brokers[1].epoch > epoch


def test_the_broker_epoch_is_the_offset_of_the_registration_in_the_metadata_log() -> None:
    cluster = Cluster()
    launch = cluster.new_launch()
    before = cluster.image.next_offset
    assert registered(cluster.register(registration(launch, "d"))).broker_epoch == before


def test_a_broker_is_fenced_until_it_is_ready() -> None:
    cluster = Cluster()
    broker = registered(cluster.register(registration(cluster.new_launch(), "d"))).broker_id
    answer = cluster.beat(broker, ready=False)
    assert answer is not None
    assert answer.fenced
    answer = cluster.beat(broker)
    assert answer is not None
    assert not answer.fenced


def test_a_directory_of_another_cluster_is_refused() -> None:
    cluster = Cluster()
    answer = cluster.register(registration(cluster.new_launch(), "d", cluster_id="other"))
    assert isinstance(answer, InconsistentClusterIdError)
    assert not cluster.image.brokers


def test_a_directory_that_claims_the_id_of_another_directory_is_refused() -> None:
    cluster = Cluster()
    cluster.start_brokers(2)
    before = cluster.image.brokers
    for directory, claimed in (("unknown", 1), ("directory-0", 1), ("unknown", 7)):
        answer = cluster.register(registration(cluster.new_launch(), directory, broker_id=claimed))
        assert isinstance(answer, InconsistentClusterIdError)
    assert cluster.image.brokers == before


def test_a_lost_id_passes_to_an_empty_directory_unless_it_is_the_last_of_an_isr() -> None:
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic(factor=3)
    for broker in (0, 1, 2):
        cluster.handle(SparkLost(cluster.image.brokers[broker].launch))
    request = registration(1, "empty")
    (last,) = cluster.partition().isr
    assert last == 2
    assert identify(cluster.image, request, lost=[]) == BrokerIdentity(3)
    assert identify(cluster.image, request, lost=[last]) == BrokerIdentity(3)
    assert identify(cluster.image, request, lost=[last, 1]) == BrokerIdentity(1, new_directory=True)


def test_a_live_broker_is_never_taken_for_lost() -> None:
    cluster = Cluster()
    cluster.start_brokers(1)
    assert identify(cluster.image, registration(1, "empty"), lost=[0]) == BrokerIdentity(1)


def test_a_broker_that_stays_away_leaves_its_id_to_an_empty_directory_which_is_in_no_isr() -> None:
    cluster = Cluster(replica_reassignment_delay_ms=1000)
    cluster.start_brokers(2)
    cluster.create_topic(factor=2)
    cluster.handle(SparkLost(2))
    cluster.pass_time(2000, alive=[0])
    assert cluster.start_broker("empty") == 1
    assert cluster.partition().isr == (0,)
    assert cluster.image.brokers[1].directory_id == "empty"


def test_a_higher_launch_supersedes_the_session_of_a_lower_one() -> None:
    cluster = Cluster()
    cluster.start_brokers(1)
    old_session = cluster.session_of[0]
    launch = cluster.new_launch()
    registered(cluster.register(registration(launch, "directory-0", broker_id=0)))
    stops = [e for e in cluster.effects if isinstance(e, Send) and isinstance(e.message, StopBroker)]
    assert [(e.session_id, e.message.superseded) for e in stops if isinstance(e.message, StopBroker)] == [
        (old_session, True)
    ]
    assert any(isinstance(e, CloseSession) and e.session_id == old_session for e in cluster.effects)


def test_a_lower_launch_is_refused() -> None:
    cluster = Cluster()
    low, high = cluster.new_launch(), cluster.new_launch()
    cluster.register(registration(high, "d"))
    assert isinstance(cluster.register(registration(low, "d", broker_id=0)), StaleLaunchError)
    assert cluster.image.brokers[0].launch == high


def test_a_launch_that_spark_lost_can_no_longer_register() -> None:
    cluster = Cluster()
    launch = cluster.new_launch()
    cluster.handle(SparkLost(launch))
    assert isinstance(cluster.register(registration(launch, "d")), StaleLaunchError)


def test_the_retry_of_a_launch_waits_until_the_first_attempt_is_gone() -> None:
    cluster = Cluster()
    cluster.start_brokers(1)
    retry = registration(1, "directory-0", broker_id=0, incarnation="second")
    assert isinstance(cluster.register(retry), DuplicateBrokerRegistrationError)
    cluster.handle(SparkLost(99))
    cluster.end_session(0)
    cluster.tick(1000)
    assert isinstance(cluster.register(retry), RegisterBrokerResponse)


def test_a_second_broker_on_an_executor_is_refused_even_before_the_first_is_ready() -> None:
    cluster = Cluster()
    cluster.register(registration(cluster.new_launch(), "d0", executor_id="e", machine="m"))
    second = registration(cluster.new_launch(), "d1", executor_id="e", machine="m")
    assert isinstance(cluster.register(second), DuplicateBrokerRegistrationError)
    elsewhere = registration(cluster.new_launch(), "d1", executor_id="e", machine="m2")
    assert isinstance(cluster.register(elsewhere), RegisterBrokerResponse)


def test_brokers_share_the_executor_of_a_plain_local_session() -> None:
    cluster = Cluster(shared_executor=True)
    cluster.start_brokers(3, executor_id="driver")
    assert len(cluster.image.live_brokers()) == 3


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"version": 99}, UnsupportedVersionError),
        ({"launch": 50}, InvalidRequestError),
        ({"launch": 0}, InvalidRequestError),
        ({"start_kind": "odd"}, InvalidRequestError),
        ({"directory_id": ""}, InvalidRequestError),
        ({"incarnation": ""}, InvalidRequestError),
    ],
)
def test_a_registration_that_makes_no_sense_is_refused(
    change: dict[str, object], error: type[SparkBrokerError]
) -> None:
    cluster = Cluster()
    values = {"launch": cluster.new_launch(), "directory": "d", **change}
    answer = cluster.register(registration(**values))  # type: ignore[arg-type]
    assert isinstance(answer, error)


@pytest.mark.parametrize("start_kind", ["clean", "process_crash"])
def test_a_new_process_ends_the_leaderships_of_the_last_one_but_stays_in_sync(start_kind: str) -> None:
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic()
    before = cluster.partition()
    assert before.leader == 0
    cluster.register(registration(cluster.new_launch(), "directory-0", broker_id=0, start_kind=start_kind))
    after = cluster.partition()
    assert (after.leader, after.leader_epoch, after.isr) == (1, before.leader_epoch + 1, before.isr)


def test_the_only_member_of_an_isr_leads_again_under_a_higher_epoch() -> None:
    cluster = Cluster()
    cluster.start_brokers(1)
    cluster.create_topic(factor=1)
    before = cluster.partition()
    registered(cluster.register(registration(cluster.new_launch(), "directory-0", broker_id=0)))
    assert (cluster.partition().leader, cluster.partition().isr) == (-1, (0,))
    cluster.beat(0)
    assert cluster.partition().leader == 0
    assert cluster.partition().leader_epoch == before.leader_epoch + 2


def test_a_machine_crash_takes_the_broker_out_of_every_isr_in_the_decision_that_registers_it() -> None:
    cluster = Cluster()
    cluster.start_brokers(2)
    cluster.create_topic("two", factor=2)
    cluster.create_topic("one", factor=1)
    alone = cluster.partition("one").leader
    crashed = registration(cluster.new_launch(), f"directory-{alone}", broker_id=alone, start_kind="machine_crash")
    registered(cluster.register(crashed))
    assert cluster.partition("two").isr == (1 - alone,)
    assert (cluster.partition("one").leader, cluster.partition("one").isr) == (-1, ())
    assert cluster.partition("one").last_known_elr == (alone,)


def test_the_same_process_resumes_its_session_without_a_new_epoch() -> None:
    cluster = Cluster()
    cluster.start_brokers(2)
    cluster.create_topic(factor=2)
    before = cluster.image
    cluster.end_session(0)
    request = registration(1, "directory-0", broker_id=0)
    assert registered(cluster.register(request)).broker_epoch == before.brokers[0].epoch
    assert cluster.image == before


@pytest.mark.parametrize(
    ("host", "port"),
    [("a b", 9092), ("", 9092), ("h\n", 9092), ("h/x", 9092), ("ü", 9092), ("x" * 256, 9092), ("h", 0)],
)
def test_a_broker_that_nobody_can_reach_is_refused(host: str, port: int) -> None:
    """Story: a host with a space in its name ended all other brokers."""
    cluster = Cluster()
    answer = cluster.register(registration(cluster.new_launch(), "d", host=host, port=port))
    assert isinstance(answer, InvalidRequestError)
    assert not cluster.image.brokers


@pytest.mark.parametrize(
    "host", ["localhost", "10.0.0.1", "::1", "[fe80::1%eth0]", "node-1.example.org", "under_score"]
)
def test_names_and_addresses_are_hosts(host: str) -> None:
    cluster = Cluster()
    assert isinstance(cluster.register(registration(cluster.new_launch(), "d", host=host)), RegisterBrokerResponse)


def placed(cluster: Cluster, directory: str) -> RegisterBrokerRequest:
    """A registration of a broker whose log directory has this path."""
    return msgspec.structs.replace(registration(cluster.new_launch(), "d"), directory=directory)


@pytest.mark.parametrize("directory", ["/data/broker-0", "/a b/.c/broker-12", "/broker-3", ""])
def test_clients_get_the_path_of_a_brokers_log_directory(directory: str) -> None:
    cluster = Cluster()
    registered(cluster.register(placed(cluster, directory)))
    assert [broker.directory for broker in describe(cluster.image).brokers] == [directory]


@pytest.mark.parametrize(
    "directory",
    [
        "/",
        "/etc",
        "broker-0",
        "/data/../broker-0",
        "/data/./broker-0",
        "/data//broker-0",
        "/data/broker-0/",
        "/data/broker-0/..",
        "/data/broker-x",
        "/data/broker-",
        "/data/b\0/broker-0",
        "/data/broker-0\n",
    ],
)
def test_a_path_that_is_no_log_directory_of_a_broker_is_refused(directory: str) -> None:
    """Readers on the broker's machine open what is in there."""
    cluster = Cluster()
    answer = cluster.register(placed(cluster, directory))
    assert isinstance(answer, InvalidRequestError)
    assert not cluster.image.brokers


def stays_in_sync(earlier: list[str], registered_as: str = "first") -> bool:
    """Whether a broker's replica may still lead after a restart whose directory knows these earlier processes."""
    cluster = Cluster()
    registered(cluster.register(registration(cluster.new_launch(), "d", incarnation=registered_as)))
    cluster.beat(0)
    cluster.create_topic(partitions=1, factor=1)
    assert cluster.topic().partitions[0].isr == (0,)
    cluster.end_session(0)
    registered(cluster.register(registration(cluster.new_launch(), "d", broker_id=0, earlier=earlier)))
    state = cluster.topic().partitions[0]
    return 0 in (*state.isr, *state.elr)


@pytest.mark.parametrize(
    ("earlier", "stays"),
    [
        (["first"], True),
        (["other", "first", "never registered"], True),
        ([], True),
        (["*", "later"], True),
        (["older"], False),
        (["older", "much older"], False),
    ],
)
def test_a_directory_that_does_not_know_its_last_process_is_an_older_copy(earlier: list[str], stays: bool) -> None:
    assert stays_in_sync(earlier) is stays


def test_a_process_that_could_not_be_recorded_proves_nothing() -> None:
    assert stays_in_sync(["older"], registered_as="unrecorded-first")


def test_a_copy_that_is_older_than_the_last_recorded_process_is_noticed_though_later_ones_could_not_be_recorded() -> (
    None
):
    """Story: a broker was started on a full disk, and then on an older copy. It led without what it had committed."""
    cluster = Cluster()
    cluster.start_brokers(2)
    cluster.create_topic("t", 1, 2)
    for launch in ("recorded", "unrecorded-next"):
        request = registration(
            cluster.new_launch(), "directory-0", broker_id=0, cluster_id=CLUSTER_ID, incarnation=launch, earlier=["*"]
        )
        cluster.end_session(0)
        cluster.register(request)
    assert cluster.image.brokers[0].recorded == "recorded"
    cluster.end_session(0)
    restored = registration(
        cluster.new_launch(), "directory-0", broker_id=0, cluster_id=CLUSTER_ID, incarnation="new", earlier=["older"]
    )
    cluster.register(restored)
    state = cluster.partition()
    assert 0 not in (*state.isr, *state.elr)
    assert "is an older copy" in "".join(cluster.notes)


def test_a_copy_of_a_directory_on_another_machine_is_named() -> None:
    """Story: a worker was cloned. Its broker and the original's ended each other, and the log spoke of an old copy."""
    cluster = Cluster()
    cluster.start_brokers(2)
    cluster.create_topic("t", 1, 2)
    of = {"cluster_id": CLUSTER_ID, "broker_id": 0}
    cluster.register(registration(cluster.new_launch(), "directory-0", incarnation="a", machine="one", **of))
    clone = registration(cluster.new_launch(), "directory-0", incarnation="b", earlier=["x"], machine="two", **of)
    cluster.register(clone)
    assert "the log directory of broker 0 of launch 4 is also on machine one" in "".join(cluster.notes)
    assert 0 not in cluster.partition().isr
