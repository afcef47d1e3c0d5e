"""A stream's sink stores each micro-batch once, whatever is killed when: real queries, real SIGKILLs, real brokers.

An application takes long to start. So several queries run in one, each on a checkpoint of its own, and one SIGKILL
finds each of them at another point. The next application recovers them, and is killed when they are at the next point.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pyspark_spark_broker import DefaultSource
from tests.spark import stream_application
from tests.spark.dying_streams import WAIT_S, Query, StreamApplication
from tests.spark.stream_application import (
    AFTER_COMMIT,
    BEFORE_COMMIT,
    DURING_COMMIT,
    EXECUTOR,
    FAILED_ATTEMPT,
    LINGERING_ATTEMPT,
    WRITTEN,
)
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(1800)

DELAYS_S = (0.0, 0.01, 0.1)
"""How long after the beginning of a commit the driver dies."""


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("brokers"), 3) as started:
        yield started


def test_queries_killed_after_their_rows_and_after_their_commit_store_each_batch_once(
    tmp_path: Path, brokers: ProcessCluster, spark: SparkSession
) -> None:
    """The tests' shared session is the application in which the queries are started again."""
    written, committed = Query(tmp_path, "written", brokers), Query(tmp_path, "committed", brokers)
    with StreamApplication(tmp_path, brokers, "first-run") as first:
        faults = [
            (query, first.start(query, point, query.add_file()))
            for query, point in ((written, WRITTEN), (committed, AFTER_COMMIT))
        ]
        for query, fault in faults:
            first.await_fault(query, fault)
        first.kill()
    written.assert_stored(0, "killed after its rows")
    committed.assert_stored(1, "killed after its commit")

    for query in (written, committed):
        last = query.add_file()
        again = stream_application.start(spark, brokers.bootstrap_servers, query.spec, DefaultSource)
        try:
            again.processAllAvailable()
        finally:
            again.stop()
        assert query.has_noted(last)
        query.assert_stored(2, "started again")


@pytest.mark.full
def test_queries_killed_at_every_point_run_after_run_store_each_batch_once(
    tmp_path: Path, brokers: ProcessCluster
) -> None:
    """Query `during` dies in each run, a little later after the beginning of a commit, and takes all others with it."""
    during, before = Query(tmp_path, "during", brokers), Query(tmp_path, "before", brokers)
    bereft, forgetful = Query(tmp_path, "bereft", brokers), Query(tmp_path, "forgetful", brokers)

    with StreamApplication(tmp_path, brokers, "first-run") as first:
        forgetful.add_file()
        noted = forgetful.add_file()
        first.start(forgetful)
        first.await_batch(forgetful, noted)
        stays = first.start(before, BEFORE_COMMIT, before.add_file())
        first.await_fault(before, stays)
        stays = first.start(bereft, WRITTEN, bereft.add_file())
        first.await_fault(bereft, stays)
        kill_during_commit(first, during, DELAYS_S[0])
    before.assert_stored(0, "killed before its commit")
    forgetful.forget(noted)
    bereft.kill_coordinator()

    with StreamApplication(tmp_path, brokers, "second-run") as second:
        stays = second.start(bereft, AFTER_COMMIT, 1)
        await_without_coordinator(second, bereft, 0, brokers)
        bereft.add_file()
        second.await_fault(bereft, stays)
        go_on(second, before, 0)
        go_on(second, forgetful, noted)
        failing = leave_a_failed_attempt(second, Query(tmp_path, "failing", brokers))
        leave_a_lingering_attempt(second, Query(tmp_path, "lingering", brokers))
        kill_during_commit(second, during, DELAYS_S[1])
    failing.assert_stored(1, "killed after a batch with a failed attempt")
    bereft.kill_coordinator()

    with StreamApplication(tmp_path, brokers, "third-run") as third:
        third.start(bereft)
        await_without_coordinator(third, bereft, 1, brokers)
        kill_during_commit(third, during, DELAYS_S[2])

    with StreamApplication(tmp_path, brokers, "last-run", master="local-cluster[2,1,1024]") as last:
        go_on(last, during, len(DELAYS_S) - 1)
        kill_an_executor(last, Query(tmp_path, "executor", brokers))


def kill_during_commit(application: StreamApplication, query: Query, delay_s: float) -> None:
    """The query has its next batch, and ends the application so long after the beginning of the commit."""
    dies = application.start(query, DURING_COMMIT, query.add_file(), delay_s=delay_s)
    application.await_death(query, dies)


def go_on(application: StreamApplication, query: Query, killed: int) -> None:
    """The batch in which the query was killed, and the next one, are stored once."""
    application.start(query)
    application.await_batch(query, killed)
    last = query.add_file()
    application.await_batch(query, last)
    query.assert_stored(last + 1, f"in the {application.run}")


def await_without_coordinator(
    application: StreamApplication, query: Query, killed: int, brokers: ProcessCluster
) -> None:
    """The coordinator of the query's transactions was killed between two runs. The next one knows what it decided."""
    application.await_batch(query, killed)
    query.assert_stored(killed + 1, f"in the {application.run}, under the next coordinator")
    eventually(brokers.launch_ended, WAIT_S, "the end of the killed coordinator")
    brokers.await_live(3)


def leave_a_failed_attempt(application: StreamApplication, query: Query) -> Query:
    """The first attempt of a task fails after its rows; the batch ends with another one."""
    fails = application.start(query, FAILED_ATTEMPT, query.add_file())
    application.await_batch(query, fails.batch)
    assert fails.marker.exists(), f"no attempt has failed in the {application.run}"
    return query


def leave_a_lingering_attempt(application: StreamApplication, query: Query) -> None:
    """An attempt that Spark gave up writes on after its batch was committed: it is refused, and stores nothing."""
    lingers = application.start(query, LINGERING_ATTEMPT, query.add_file())
    application.await_batch(query, lingers.batch)
    query.assert_stored(1, "while an attempt lingers")
    lingers.marker.with_suffix(".go-on").touch()
    ended = lingers.marker.with_suffix(".ended")
    application.await_file(query, ended)
    assert "nothing was refused" not in ended.read_text()
    last = query.add_file()
    application.await_batch(query, last)
    query.assert_stored(2, "after the attempt that lingered")


def kill_an_executor(application: StreamApplication, query: Query) -> None:
    """It is killed after the rows of a task. It is replaced, and they are stored once."""
    kills = application.start(query, EXECUTOR, query.add_file())
    application.await_batch(query, kills.batch)
    assert kills.marker.exists(), f"no executor was killed in the {application.run}"
    query.assert_stored(1, "after its executor was killed")
