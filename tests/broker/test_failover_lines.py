"""When a leader is killed, the processes' logs tell why the leader changed and what each broker saw."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_broker import Admin, NewTopic, Producer
from spark_broker.broker.log_format import JSON, formatter
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

CONTROLLER = "spark_broker.controller"

Line = dict[str, Any]


class ControllerLines(logging.Handler):
    """The controller's log as an application's handler with the JSON format gets it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(formatter(JSON))
        self._texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(self.format(record))

    def lines(self, since: int = 0) -> list[Line]:
        return [json.loads(text) for text in self._texts[since:]]


@pytest.fixture
def controller() -> Iterator[ControllerLines]:
    logger, handler = logging.getLogger(CONTROLLER), ControllerLines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture
def cluster(tmp_path: Path, controller: ControllerLines) -> Iterator[ProcessCluster]:
    assert controller.lines() == []
    with ProcessCluster(tmp_path, 3, {"log.format": "json"}, output=tmp_path) as cluster:
        with Admin(cluster.bootstrap_servers) as admin:
            admin.create_topics([NewTopic("orders", partitions=1, replication_factor=3)])
        with Producer(cluster.bootstrap_servers) as producer:
            producer.send("orders", b"one").result(30)
        yield cluster


def of_broker(cluster: ProcessCluster, slot: int) -> list[Line]:
    lines = (cluster.base / f"slot-{slot}.log").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def first(lines: list[Line], found: Callable[[Line], bool]) -> int:
    """The position of the first such line, or -1; it does not wait."""
    return next((at for at, line in enumerate(lines) if found(line)), -1)


def elected(line: Line) -> bool:
    return line.get("topic_partition") == "orders-0" and "old_leader" in line


def test_the_lines_tell_why_the_leader_changed(cluster: ProcessCluster, controller: ControllerLines) -> None:
    status = {broker.id: broker for broker in cluster.controller.status().brokers}
    (created,) = (line for line in controller.lines() if "orders-0: created" in line["message"])
    leader, epoch = created["leader"], created["leader_epoch"]
    killed = len(controller.lines())
    os.kill(status[leader].pid, signal.SIGKILL)
    eventually(lambda: first(controller.lines(killed), elected) >= 0, 60, "the election")
    lines = controller.lines(killed)

    ended = first(lines, lambda line: line["message"].endswith("ends: its stream ended"))
    fenced = first(lines, lambda line: line["message"].startswith("fenced"))
    changed = first(lines, elected)
    assert 0 <= ended < fenced < changed
    assert lines[ended]["broker_id"] == leader
    assert lines[fenced]["broker_ids"] == [leader]
    assert lines[fenced]["why"] == "its stream ended and its port refuses connections"
    change = lines[changed]
    assert (change["old_leader"], change["old_leader_epoch"]) == (leader, epoch)
    assert change["leader"] != leader
    assert change["leader_epoch"] == epoch + 1
    assert leader in change["old_isr"]
    assert leader not in change["isr"]
    assert change["why"] == f"broker {leader} of launch {status[leader].launch} is fenced"

    slot = cluster.slot_of(status[change["leader"]].pid)
    assert slot is not None

    def took_over(line: Line) -> bool:
        return line.get("role") == "leader" and line.get("leader_epoch") == epoch + 1

    eventually(lambda: first(of_broker(cluster, slot), took_over) >= 0, 60, "the new leader's line")
    taken = of_broker(cluster, slot)[first(of_broker(cluster, slot), took_over)]
    assert (taken["topic_partition"], taken["old_role"], taken["old_leader_epoch"]) == ("orders-0", "follower", epoch)
    assert taken["offset"] == 1, "it has the record that was acknowledged"
    assert taken["time"] >= change["time"][:19], "it hears of the decision after it was made"


@pytest.mark.full
def test_a_broker_that_comes_back_says_what_it_has_and_is_asked_for_and_let_in_again(
    cluster: ProcessCluster, controller: ControllerLines
) -> None:
    (created,) = (line for line in controller.lines() if "orders-0: created" in line["message"])
    status = {broker.id: broker for broker in cluster.controller.status().brokers}
    leader = created["leader"]
    slot = cluster.slot_of(status[leader].pid)
    assert slot is not None
    os.kill(status[leader].pid, signal.SIGKILL)
    eventually(lambda: first(controller.lines(), elected) >= 0, 60, "the election")
    change = controller.lines()[first(controller.lines(), elected)]
    relaunched = len(controller.lines())
    cluster.launch_ended()

    def back(line: Line) -> bool:
        return line.get("topic_partition") == "orders-0" and leader in line.get("isr", ())

    eventually(lambda: first(controller.lines(relaunched), back) >= 0, 60, "the return to the ISR")
    lines = controller.lines(relaunched)
    joined = lines[first(lines, back)]
    assert joined["why"] == f"proposed by broker {change['leader']}, which leads"
    registered = first(lines, lambda line: "registered (process_crash start)" in line["message"])
    assert 0 <= registered < first(lines, back)

    opened = [line for line in of_broker(cluster, slot) if "opened (process_crash start)" in line["message"]]
    assert [(line["topic_partition"], line["offset"], line["log_epoch"]) for line in opened] == [("orders-0", 1, 0)]
    new_leader = cluster.slot_of(status[change["leader"]].pid)
    assert new_leader is not None

    def settled() -> list[str]:
        of_leader = [line["message"] for line in of_broker(cluster, new_leader) if line.get("isr")]
        return [text.split(":")[1].split()[0] for text in of_leader if "ISR" in text and "-> leader" not in text]

    eventually(lambda: "the" in settled(), 60, "the answer to the proposal")
    proposals = [line["message"] for line in of_broker(cluster, new_leader) if "asks for ISR" in line["message"]]
    (asked,) = (text for text in proposals if f"broker {leader} has caught up" in text)
    assert f"in leader epoch {change['leader_epoch']}" in asked
