"""A cluster under attack: its brokers and its controller refuse, go on serving everybody else, and do not grow."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pyarrow as pa
import pytest

from spark_broker import Admin, NewTopic, Producer
from tests.fuzz.attacks import Attacker, Known
from tests.fuzz.raw_attacks import ATTACKS, SlowLoris, Target
from tests.fuzz.witness import Cost, Witness
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

BROKERS = 3
KINDS = ("append", "fetch", "replica")
SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False), ("s", pa.string())])
TARGET = "target"

GROWN_MIB = 220
"""What a process may keep after all attacks: libraries loaded late, and pools of Arrow."""

PEAK_GROWN_MIB = 420
"""While it serves, above all an answer of `fetch.max.bytes` (55 MiB). Before the answer was bounded: 4,200."""

MORE_THREADS = 40
"""A few serve the witness. An attack that left one per stream would leave hundreds."""

MORE_DESCRIPTORS = 20
"""Of the witness, and of what the cluster itself opens late. Attacks open thousands of connections."""

OUR_BUGS = {"UnknownServerError", "InvariantError"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    config = {
        "broker.session.timeout.ms": 5000,
        # A damaged request may create these topics, and each partition that is written to has two files open.
        "offsets.topic.num.partitions": 2,
        "transaction.state.log.num.partitions": 2,
        "socket.request.max.bytes": 8_000_000,
    }
    with ProcessCluster(tmp_path_factory.mktemp("attacked"), BROKERS, config) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def known(cluster: ProcessCluster) -> Known:
    with Admin(cluster.bootstrap_servers) as admin:
        config = {"min.insync.replicas": 2}
        for name in (TARGET, "witness"):
            topic = NewTopic(name, partitions=2, replication_factor=BROKERS, schema=SCHEMA, config=config)
            admin.create_topic(topic)
        description, brokers = admin.describe_topic(TARGET), admin.describe_cluster().brokers
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(20):
            rows = [{"n": number, "s": "x" * 1000}] * 100
            producer.append(TARGET, rows, partition=number % 2).result(30)
    leader_epoch = description.partitions[0].leader_epoch
    return Known(TARGET, description.topic_id, 2, leader_epoch, {b.id: b.epoch for b in brokers})


@pytest.fixture(scope="module")
def cost(cluster: ProcessCluster, known: Known) -> Cost:
    return Cost(cluster, BROKERS)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind(cost: Cost) -> Iterator[None]:
    """After all attacks. A handler's thread waits 10 s for more work before it ends, so not after each."""
    yield
    eventually(lambda: max(cost.more_threads().values()) <= MORE_THREADS, 60, f"threads: {cost.more_threads()}")
    eventually(lambda: max(cost.more_descriptors().values()) <= MORE_DESCRIPTORS, 60, f"{cost.more_descriptors()}")


@pytest.fixture(autouse=True)
def everybody_else_is_served(cluster: ProcessCluster, known: Known, cost: Cost) -> Iterator[None]:
    """Whatever the test did: an ordinary producer went on, all its records are read in order, no process has grown."""
    witness = Witness(cluster.bootstrap_servers, "witness")
    before = witness.read_back()
    with witness:
        yield
        eventually(lambda: witness.acknowledged > 3, 60, "acknowledgements during the attack")
    assert cost.gone() == []
    assert witness.read_back() == [*before, *range(witness.acknowledged)]
    assert max(cost.grown_mib().values()) <= GROWN_MIB, cost.grown_mib()
    assert max(cost.peak_grown_mib().values()) <= PEAK_GROWN_MIB, cost.peak_grown_mib()


def addresses(cluster: ProcessCluster) -> list[tuple[str, int]]:
    """The addresses of every broker, and of the controller."""
    brokers = [address.split(":") for address in cluster.bootstrap_servers.split(",")]
    return [*((host, int(port)) for host, port in brokers), ("127.0.0.1", cluster.controller.port)]


def attack(
    cluster: ProcessCluster, known: Known, method: str, times: int, *, seed: int = 0, servers: slice = slice(None)
) -> Counter[str]:
    """The answers of these servers (all by default) to this attack; no answer may be a bug of ours."""
    answers: Counter[str] = Counter()
    for number, (host, port) in list(enumerate(addresses(cluster)))[servers]:
        attacker = Attacker(host, port, known, f"{method}/{seed}/{number}")
        for _ in range(times):
            getattr(attacker, method)()
        attacker.close()
        answers += attacker.answers
    assert not OUR_BUGS & set(answers), f"{answers}; again: seed {seed}"
    return answers


def test_damaged_calls_get_typed_errors(cluster: ProcessCluster, known: Known) -> None:
    answers = attack(cluster, known, "damaged_call", 60)
    assert answers["InvalidRequestError"] > 20
    assert len(answers) > 5, "the attacker does not get past the decoder"


def test_damaged_streams_get_typed_errors(cluster: ProcessCluster, known: Known) -> None:
    answers = attack(cluster, known, "damaged_stream", 60)
    assert answers["InvalidRequestError"] > 20
    assert answers["AppendResponse"] + answers["FetchResponse"] + answers["ReplicaFetchResponse"] > 5


@pytest.mark.full
def test_requests_for_absurd_sizes_cost_no_more_than_a_large_fetch(cluster: ProcessCluster, known: Known) -> None:
    answers = attack(cluster, known, "absurd_requests", 1, servers=slice(BROKERS))
    assert answers["FetchResponse"] > 0


def test_half_open_streams_and_endless_waits_keep_nobody_out(cluster: ProcessCluster, known: Known, cost: Cost) -> None:
    host, port = addresses(cluster)[0]
    attackers = [Attacker(host, port, known, f"half open {number}") for number in range(10)]
    kept = [
        attacker.endless_wait() if number % 2 else attacker.half_open_stream(("append", "fetch", "replica")[number % 3])
        for attacker in attackers
        for number in range(6)
    ]
    attack(cluster, known, "damaged_call", 5)
    assert cost.gone() == []
    for peer in kept:
        peer.sock.close()


@pytest.mark.parametrize(
    "at_once", [pytest.param(1, marks=pytest.mark.quick), pytest.param(3, marks=pytest.mark.full)], ids=["one", "all"]
)
def test_attacks_on_the_carrier_do_no_harm(cluster: ProcessCluster, known: Known, cost: Cost, at_once: int) -> None:
    """Each attack on one of them in turn, or on all."""
    rng = random.Random(5)
    brokers, controller = addresses(cluster)[1:BROKERS], addresses(cluster)[BROKERS]
    targets = [*(Target(host, port, KINDS) for host, port in brokers), Target(*controller, ("session",))]
    for number, (name, harm) in enumerate(ATTACKS.items()):
        for target in (targets * 2)[number % 3 :][:at_once]:
            harm(target, rng)
        assert cost.gone() == [], name


@pytest.mark.full
def test_connections_that_speak_slowly_or_not_at_all_keep_nobody_out(cluster: ProcessCluster, known: Known) -> None:
    host, port = addresses(cluster)[0]
    with closing(SlowLoris(Target(host, port, KINDS), 150)) as slow:
        for _ in range(20):
            slow.step()
        attack(cluster, known, "damaged_call", 5)
        slow.begin_request()
        attack(cluster, known, "damaged_call", 5)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["damaged_call", "damaged_stream"])
def test_thousands_of_damaged_requests_get_typed_errors(cluster: ProcessCluster, known: Known, method: str) -> None:
    for seed in range(1, 6):
        attack(cluster, known, method, 200, seed=seed)
