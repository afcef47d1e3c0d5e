"""A broker's log: each change of state is one line that says who, what, which epoch and why."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from spark_broker.broker.proposal_queue import ProposalQueue, announce, settle, still_open
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.core.effects import ProposeIsr
from spark_broker.core.replica import Diverging, Fetched
from spark_broker.errors import IneligibleReplicaError
from spark_broker.protocol.messages import AlterIsrResult, AlterPartitionResult
from tests.broker.lone_partition import LonePartition
from tests.broker.test_fetch_session import append, elect


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


class NamedPartition:
    """A partition by name only; refusals are counted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.refused = 0

    def __str__(self) -> str:
        return self.name

    def isr_refused(self, *_: int) -> None:
        self.refused += 1


def manager(partitions: int) -> ReplicaManager:
    named = {("t", number): NamedPartition(f"t-{number}") for number in range(partitions)}
    return cast("ReplicaManager", SimpleNamespace(find=lambda *key: named.get(key)))


def queue(partitions: int) -> ProposalQueue:
    waiting = ProposalQueue()
    reason = "broker 3 ends at 120, the leader at 500"
    for number in range(partitions):
        waiting.add(("t", number), ProposeIsr(7, 12, ((1, 5), (2, 6)), reason=reason))
    return waiting


def test_what_a_leader_asks_for_is_said_once_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    waiting = queue(1)
    proposals = waiting.take()
    announce(manager(1), waiting.take_news())
    waiting.put_back(still_open(cast("ReplicaManager", SimpleNamespace(find=lambda *_: _Current())), proposals))
    assert waiting.take() == proposals
    announce(manager(1), waiting.take_news())
    assert lines(caplog) == [
        "asks for t-0: ISR 1, 2 in leader epoch 7 (broker 3 ends at 120, the leader at 500)",
    ]


class _Current:
    def is_current(self, _: ProposeIsr) -> bool:
        return True


def test_a_follower_of_hundreds_of_partitions_that_lags_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    announce(manager(334), queue(334).take_news())
    (line,) = lines(caplog)
    assert line.startswith("asks for 334 ISRs: t-0: ISR 1, 2 in leader epoch 7 (broker 3 ends at 120, ")
    assert line.endswith("; ...")
    assert "t-3" not in line


def test_refusals_of_one_request_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    code = IneligibleReplicaError.code
    results = [AlterIsrResult("t", number, code, "broker 2 is not live") for number in range(2)]
    settle(manager(2), AlterPartitionResult(results), queue(2).take())
    (line,) = lines(caplog)
    refusals = [f"t-{number} in leader epoch 7: {code} broker 2 is not live" for number in range(2)]
    assert line == f"the controller refuses {'; '.join(refusals)}"


def test_a_follower_says_what_it_cuts_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lone = LonePartition(tmp_path / "t-0")
    elect(0, 1, lone.partition)  # with broker 2 in the ISR: what comes now is not committed
    append(lone.partition, b"a")
    elect(2, 2, lone.partition)
    position = lone.partition.fetch_position()
    assert position is not None
    caplog.set_level(logging.INFO)
    lone.partition.apply(Fetched(position, 2, 0, 0, Diverging(0, 0)), [])
    assert lone.partition.replica.log_end_offset == 0
    (line,) = lines(caplog)
    leader = "broker 2, which leads in leader epoch 2, has epoch 0 up to 0"
    assert line == f"t-0: truncated from 1 to 0: {leader}; our log ends at 1 in epoch 1"
    lone.close()
