"""Spark's executors as the launcher needs them: which are alive, and how to run a job on exactly one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark import RDD, SparkContext
from pyspark.serializers import NoOpSerializer

from spark_broker.addresses import without_brackets
from spark_broker.driver.master import local_cluster

LOCAL_EXECUTOR_ID = "driver"


@dataclass(frozen=True)
class Executor:
    """A live executor: Spark's id for it, the host that Spark knows it by, and its cores."""

    id: str
    host: str
    cores: int


def local_slots(sc: SparkContext) -> int:
    """Tasks that a local master runs at once; 0 where the master is not local."""
    match = re.match(r"local(?:\[([^,\]]+)(?:,.*)?\])?$", sc.master or "")
    if match is None:
        return 0
    threads = (match.group(1) or "1").strip()
    if threads == "*":
        return int(_jvm(sc).java.lang.Runtime.getRuntime().availableProcessors())
    return int(threads)


def expected_executors(sc: SparkContext) -> int | None:
    """How many executors the application is going to have, where its settings say so."""
    cluster = local_cluster(sc.master)
    if cluster is not None:
        return cluster[0]
    instances = sc.getConf().get("spark.executor.instances")
    return int(instances) if instances else None


def cores_of_executor(sc: SparkContext) -> int | None:
    """Cores of each executor, where the application's settings say so."""
    cluster = local_cluster(sc.master)
    if cluster is not None:
        return cluster[1]
    cores = sc.getConf().get("spark.executor.cores")
    return int(cores) if cores else None


def live_executors(sc: SparkContext) -> list[Executor]:
    """The executors that Spark counts as alive, in order of their number."""
    listed = _scala_context(sc).statusStore().executorList(True)
    executors = [listed.apply(i) for i in range(listed.size())]
    live = [
        Executor(str(e.id()), _host(str(e.hostPort())), int(e.totalCores()))
        for e in executors
        if e.isActive() and e.id() != LOCAL_EXECUTOR_ID
    ]
    return sorted(live, key=lambda e: (len(e.id), e.id))


def leaving_executors(sc: SparkContext, executors: Iterable[Executor]) -> set[str]:
    """Ids of the executors that Spark decommissions: they get no more tasks, and end when their tasks have ended."""
    scheduler = _scala_context(sc).taskScheduler()
    return {executor.id for executor in executors if scheduler.getExecutorDecommissionState(executor.id).isDefined()}


def removal_reason(sc: SparkContext, executor_id: str) -> str:
    """Why Spark counts this executor as lost, in one line; empty where Spark does not say."""
    try:
        listed = _scala_context(sc).statusStore().executorList(False)
        gone = next((e for e in map(listed.apply, range(listed.size())) if str(e.id()) == executor_id), None)
        reason = gone.removeReason() if gone is not None else None
    except (Py4JError, OSError, AttributeError):
        return ""
    lines = str(reason.get()).splitlines() if reason is not None and reason.isDefined() else []
    return lines[0] if lines else ""


def with_environment(sc: SparkContext, name: str, value: str) -> SparkContext:
    """The same context, whose Python workers have one more variable in their environment.

    Spark keys `pyspark.daemon` by that environment: on each executor, these tasks have a daemon of their own.
    """
    twin: SparkContext = object.__new__(type(sc))
    twin.__dict__.update(sc.__dict__)
    twin.environment = {**sc.environment, name: value}
    return twin


def pinned_rdd(sc: SparkContext, executor: Executor, row: bytes) -> RDD[bytes]:
    """An RDD of one partition and one row that prefers this executor.

    PySpark's `parallelize` takes no locations; Scala's `makeRDD` does.
    """
    jvm = _jvm(sc)
    locations = jvm.java.util.ArrayList()
    locations.add(f"executor_{executor.host}_{executor.id}")
    rows = jvm.java.util.ArrayList()
    rows.add(jvm.scala.Tuple2(bytearray(row), jvm.PythonUtils.toSeq(locations)))
    any_class = getattr(getattr(jvm, "scala.reflect.ClassTag$"), "MODULE$").Any()
    scala_rdd = _scala_context(sc).makeRDD(jvm.PythonUtils.toSeq(rows), any_class)
    return RDD(scala_rdd.toJavaRDD(), sc, NoOpSerializer())


def is_stopped(sc: SparkContext) -> bool:
    """Whether the context was stopped: by the user, or because the application or its JVM is gone."""
    try:
        return says_that_it_is_stopped(sc)
    except (Py4JError, OSError):
        return True


def says_that_it_is_stopped(sc: SparkContext) -> bool:
    """Raises Py4JError and OSError where the JVM does not answer: it may be gone, or at a limit for a moment."""
    java_context = sc._jsc
    return java_context is None or bool(java_context.sc().isStopped())


def _scala_context(sc: SparkContext) -> Any:
    return sc._jsc.sc()


def _jvm(sc: SparkContext) -> Any:
    return sc._jvm


def _host(host_port: str) -> str:
    # A new executor is listed by its host alone until its block manager has registered; an IPv6 host is in brackets.
    host, colon, port = host_port.rpartition(":")
    alone = not (colon and port.isdigit() and (":" not in host or host.endswith("]")))
    return without_brackets(host_port if alone else host)
