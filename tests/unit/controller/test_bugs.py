"""A call or a registration that meets a bug: it ends, and the controller goes on with what it had."""

from __future__ import annotations

from typing import NoReturn

import pytest

from spark_broker.controller import controller
from spark_broker.controller.effects import CloseSession, Reply
from spark_broker.controller.events import BrokerRegisters, CallReceived
from spark_broker.errors import InvariantError, NoMemoryError, UnknownServerError
from spark_broker.protocol.messages import MetadataRequest
from tests.unit.controller.cluster import Cluster, registration

BUG = TypeError("nobody has thought of this value")


def raise_bug(*_: object) -> NoReturn:
    raise BUG


def test_a_bug_in_the_decision_on_a_call_ends_the_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    before = cluster.image
    with monkeypatch.context() as patched:
        patched.setattr(controller, "answer", raise_bug)
        assert cluster.handle(CallReceived(1, MetadataRequest(None), None)).effects == (Reply(1, BUG),)
    assert cluster.image == before
    assert cluster.new_launch() == 1


def test_a_bug_in_the_decision_on_a_registration_ends_that_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    launch = cluster.new_launch()
    with monkeypatch.context() as patched:
        patched.setattr(controller, "register", raise_bug)
        (closed,) = cluster.handle(BrokerRegisters(7, registration(launch, "d"), 0)).effects
    assert isinstance(closed, CloseSession)
    assert isinstance(closed.error, UnknownServerError)
    assert f"{__file__}:" in cluster.notes[-1], "the log says where"
    cluster.register(registration(launch, "d"))
    assert cluster.image.brokers


def test_a_broken_invariant_ends_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()

    def break_invariant(*_: object) -> NoReturn:
        raise InvariantError("broken")

    monkeypatch.setattr(controller, "answer", break_invariant)
    with pytest.raises(InvariantError, match="broken"):
        cluster.handle(CallReceived(1, MetadataRequest(None), None))


def test_no_memory_for_a_registration_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> NoReturn:
        raise MemoryError

    cluster = Cluster()
    request = registration(cluster.new_launch(), "d")
    monkeypatch.setattr(controller, "register", exhausted)
    assert isinstance(cluster.register(request), NoMemoryError)
