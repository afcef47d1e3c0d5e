"""Plain `local[2]`, as in a notebook on two cores: in a process of its own, because a process has one Spark session."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.spark.session_process import SessionProcess
from tests.support.story import step
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(600)
"""Several waits, each with a deadline of its own that says what was awaited; this bounds their sum."""


@pytest.mark.full
def test_two_task_slots_hold_brokers_and_queries_and_no_end_of_the_session_leaves_a_broker(tmp_path: Path) -> None:
    with SessionProcess("local[2]", tmp_path) as session:
        with step("three brokers and a query fit into two task slots"):
            session.begin(3)
            assert len(set(session.pids())) == 3
            total = "spark.range(0, 1000, numPartitions=4).selectExpr('sum(id) AS total').collect()[0].total"
            assert session.ask(total) == 499_500
        with step("it says once that all brokers share one executor"):
            assert session.log.count("all 3 brokers share it") == 1
        with step("a killed broker comes back, and the others stay"):
            a_killed_broker_comes_back(session)
        with step("a broker is added"):
            assert session.ask("cluster.add_broker()") == 3
            session.brokers += session.pids()
        with step("the cluster is stopped"):
            session.tell("cluster.stop()")
            session.await_no_broker()

        session.begin()
        session.assert_no_end_leaves_a_broker()


def a_killed_broker_comes_back(session: SessionProcess) -> None:
    killed, *others = session.pids()
    os.kill(killed, signal.SIGKILL)
    first = "(lambda broker: broker.pid if not broker.fenced else None)(cluster.describe().brokers[0])"
    eventually(lambda: session.ask(first) not in (None, killed), 60, "the killed broker's replacement")
    assert session.pids()[0] != killed
    assert session.pids()[1:] == others
    session.brokers += session.pids()
