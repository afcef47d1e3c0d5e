"""The driver's port for keepers: whatever a peer sends ends its own connection and nothing else."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from spark_broker.broker.hosting import MAX_LINE_BYTES
from spark_broker.broker.spec import LOST, BrokerOutcome
from spark_broker.driver.executors import Executor
from spark_broker.driver.keeper_connections import KeeperConnection, KeeperConnections
from spark_broker.driver.keeper_host import _Post
from spark_broker.driver.keeper_task import BrokerEnded, FromKeeper, KeeperHello, Kept, to_line
from tests.fuzz.extremes import json_cases
from tests.support.waiting import eventually

TOKEN = "of this cluster"

HOSTILE = {
    "not UTF-8": b'{"type":"\xff"}\n',
    "one byte": b"\xff\n",
    "brackets": b"[" * 100_000 + b"\n",
    "digits": b'{"type":' + b"9" * 10_000 + b"}\n",
    "another type": b'{"type":"nobody"}\n',
    "nothing": b"\n",
    "an endless line": b"x" * (MAX_LINE_BYTES + 2),
}


@dataclass
class Listener:
    """Welcomes whoever knows the token."""

    welcomed: list[str] = field(default_factory=list)
    messages: list[FromKeeper] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    def welcome(self, connection: KeeperConnection, token: str) -> bool:
        self.welcomed.append(token)
        return token == TOKEN

    def heard(self, connection: KeeperConnection, message: FromKeeper) -> None:
        self.messages.append(message)

    def gone(self, connection: KeeperConnection) -> None:
        self.left.set()


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def connections(listener: Listener) -> Iterator[KeeperConnections]:
    started = KeeperConnections("127.0.0.1", listener)
    started.start()
    yield started
    started.close()


def connect(connections: KeeperConnections) -> socket.socket:
    return socket.create_connection(("127.0.0.1", connections.port), timeout=20)


def hello() -> bytes:
    return to_line(KeeperHello(TOKEN, 1))


@pytest.mark.parametrize("known", [False, True], ids=["a stranger", "a keeper"])
@pytest.mark.parametrize("name", HOSTILE)
def test_bytes_that_are_no_message_end_their_connection_alone(
    connections: KeeperConnections, listener: Listener, name: str, known: bool
) -> None:
    with connect(connections) as peer, connect(connections) as bystander:
        bystander.sendall(hello())
        if known:
            peer.sendall(hello())
        eventually(lambda: len(listener.welcomed) == 1 + known, what="the welcome of the keepers")
        peer.sendall(HOSTILE[name])
        assert peer.recv(100) == b"", "its connection ends"
        with connect(connections) as later:
            later.sendall(hello())
            eventually(lambda: len(listener.welcomed) == 2 + known, what="a later keeper is welcome")
        bystander.sendall(hello())
        eventually(lambda: listener.messages, what="the bystander is still heard")
    assert connections.is_alive()


def test_a_place_that_has_no_job_yet_takes_no_keeper() -> None:
    """Story: until the first job had its token, a stranger with an empty one was taken for the keeper."""
    tokens = {_Post(Executor("1", "127.0.0.1", 1)).token for _ in range(3)}
    assert len(tokens) == 3
    assert "" not in tokens


MESSAGES = (KeeperHello(TOKEN, 1), Kept(1, 1, adopted=True), BrokerEnded(1, BrokerOutcome(reason=LOST)))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_extreme_of_every_field_ends_its_connection_at_most(
    connections: KeeperConnections, listener: Listener, message: FromKeeper
) -> None:
    for case in json_cases(message):
        with connect(connections) as peer:
            peer.sendall(b"" if isinstance(message, KeeperHello) else hello())
            peer.sendall(json.dumps(case.tree).encode() + b"\n")
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(100) == b"", f"{case}: its connection ends"
    assert connections.is_alive()
    with connect(connections) as later:
        later.sendall(hello() + to_line(Kept(2**40, 1, adopted=False)))
        eventually(lambda: Kept(2**40, 1, adopted=False) in listener.messages, what="a later keeper is heard")
