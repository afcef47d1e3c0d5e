"""Every field of every message with extreme values of its type, sent to brokers and to the controller.

Every call gets a good answer or a typed error. No process ends, and everybody else is served as before.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from spark_broker import Admin, NewTopic
from spark_broker.protocol.messages import CallRequest
from tests.fuzz.extreme_attacks import (
    NO_ANSWER,
    STREAMS,
    ExtremePeer,
    Victim,
    all_cases,
    drawn_pairs,
    learn,
    may_wait,
    of_groups,
)
from tests.fuzz.extremes import Case
from tests.fuzz.witness import Cost, Witness
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

BROKERS = 3
SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False), ("s", pa.string())])
SEED = int(os.environ.get("SEED", "1"))
PAIRS = 2000
ROUND = 100
"""After so many cases, what the attacker knows is learned anew: some cases move, cut or delete the topic."""
OUR_BUGS = ("UnknownServerError", "InvariantError")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    config = {
        "broker.session.timeout.ms": 5000,
        "offsets.topic.num.partitions": 4,
        "socket.request.max.bytes": 8_000_000,
        "request.timeout.ms": 5000,
    }
    with ProcessCluster(tmp_path_factory.mktemp("extremes"), BROKERS, config) as cluster:
        with Admin(cluster.bootstrap_servers) as admin:
            settings = {"min.insync.replicas": 2}
            admin.create_topic(NewTopic("witness", 1, BROKERS, schema=SCHEMA, config=settings))
        yield cluster


@pytest.fixture(scope="module")
def cost(cluster: ProcessCluster) -> Cost:
    return Cost(cluster, BROKERS)


@pytest.fixture(scope="module")
def bootstrap(cluster: ProcessCluster) -> str:
    """From the start: later, a broker that does not exist may be in the list as well."""
    return cluster.bootstrap_servers


def victim(bootstrap: str) -> Victim:
    return learn(bootstrap, NewTopic("victim", 1, BROKERS, schema=SCHEMA), SCHEMA)


Deck = Callable[[Victim, int], list[Case]]
"""The cases of a seed, the same in each round but for what the attacker knows."""


def shuffled(known: Victim, seed: int) -> list[Case]:
    deck = list(all_cases(known))
    random.Random(seed).shuffle(deck)
    return deck


def pairs(known: Victim, seed: int) -> list[Case]:
    return list(drawn_pairs(known, random.Random(seed), PAIRS))


def groups(known: Victim, seed: int) -> list[Case]:
    deck = list(of_groups(known))
    random.Random(seed).shuffle(deck)
    return deck


def attack(cluster: ProcessCluster, bootstrap: str, cost: Cost, deck: Deck, seed: int, most: int) -> None:
    """Try up to so many cases of the deck, each on every server."""
    servers = [(host, int(port)) for host, _, port in (address.partition(":") for address in bootstrap.split(","))]
    servers.append(("127.0.0.1", cluster.controller.port))
    for first in range(0, most, ROUND):
        known = victim(bootstrap)
        cases = deck(known, seed)[first : min(first + ROUND, most)]
        if not cases:
            return
        peers = [ExtremePeer(host, port, known) for host, port in servers]
        for number, case in enumerate(cases, first):
            for server, peer in enumerate(peers):
                answer = peer.send(case)
                again = f"server {server}, {deck.__name__} of seed {seed}, case {number}: {case}: {answer}"
                assert cost.gone() == [], again
                assert is_answer(case, answer), again
        for peer in peers:
            peer.close()


def is_answer(case: Case, answer: str) -> bool:
    """A peer that asks for no answer, or to wait for one, need not get one."""
    if answer == NO_ANSWER:
        return may_wait(case)
    return answer not in OUR_BUGS and not answer.startswith("closed")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("deck", "most"),
    [
        pytest.param(shuffled, 200, marks=pytest.mark.quick),
        pytest.param(pairs, 100, marks=pytest.mark.quick),
        pytest.param(groups, 100, marks=pytest.mark.quick),
        pytest.param(shuffled, 10_000, marks=pytest.mark.full),
        pytest.param(pairs, PAIRS, marks=pytest.mark.full),
    ],
    ids=["some", "some pairs", "some of groups", "all", "pairs"],
)
def test_every_extreme_gets_an_answer_and_everybody_else_is_served(
    cluster: ProcessCluster, bootstrap: str, cost: Cost, deck: Deck, most: int
) -> None:
    witness = Witness(bootstrap, "witness")
    before = witness.read_back()
    with witness:
        attack(cluster, bootstrap, cost, deck, SEED, most)
        acknowledged = witness.acknowledged
        eventually(lambda: witness.acknowledged > acknowledged, 60, "an acknowledgement after the attack")
    assert cost.gone() == []
    assert witness.read_back() == [*before, *range(witness.acknowledged)]
    with Admin(bootstrap) as admin:
        # A follower that some value has stopped, or that its leader takes no report of, would leave the ISR.
        eventually(lambda: members_of_isr(admin) == BROKERS, 60, "every replica of the witness is in sync")


def members_of_isr(admin: Admin) -> int:
    return len(admin.describe_topic("witness").partitions[0].isr)


def test_every_message_that_a_server_takes_is_tried(bootstrap: str) -> None:
    tried = {case.message for case in all_cases(victim(bootstrap))}
    assert {kind.__name__ for kind in (*CallRequest.__args__, *STREAMS)} <= tried
