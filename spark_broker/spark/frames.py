"""Shortcuts: a topic as a DataFrame, and a view of each topic for SQL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from spark_broker.config import AdminConfig
from spark_broker.errors import InvalidDataError, SparkBrokerError
from spark_broker.setting_values import listed, to_text
from spark_broker.spark.refusals import invalid_option

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMAT = "spark_broker"
SERVERS_SETTING = "spark.spark_broker.bootstrap.servers"
"""A session's default for bootstrap.servers."""

SHOWN_MAX = 10
"""The reasons of so many topics are shown."""


def read_topic(
    spark: SparkSession,
    topic: str,
    columns: Sequence[str] | None = None,
    *,
    bootstrap_servers: str | None = None,
    stream: bool = False,
    **options: str,
) -> DataFrame:
    """The topic as a DataFrame, with only these columns (None: all). `stream`: as a streaming DataFrame.

    A batch read of a topic with a history begins where the history begins: Delta scans the table, and the rest comes
    from the log. `bootstrap_servers` None: the cluster that this process runs, or the session's setting
    spark.spark_broker.bootstrap.servers. `options`: those of the source. Raises InvalidConfigError without an address.
    Spark raises AnalysisException with the source's typed error in it.
    """
    from spark_broker.client import given

    topic, streaming = given.topic_name(topic), given.flag(stream, "stream")
    chosen = {} if columns is None else {"columns": listed(given.texts(columns, "columns"))}
    texts = {name: given.text(to_text(value), name) for name, value in options.items()}
    values = {"bootstrap.servers": servers_of(spark, bootstrap_servers), **texts, **chosen}
    frame = (spark.readStream if streaming else spark.read).format(FORMAT).options(**values).load(topic)
    if streaming or is_remote(spark):
        return frame
    from spark_broker.spark.history_scan import with_history

    return with_history(spark, frame, topic, values)


def is_remote(spark: object) -> bool:
    """Whether this is a Spark Connect session. Its process has neither a JVM nor, as a rule, a way to the brokers."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def create_views(spark: SparkSession, bootstrap_servers: str | None = None) -> list[str]:
    """Make or replace a temporary view of every topic, under the topic's name. Returns the names.

    SQL needs backticks around a name with a dash. A view shows the records that there were when it was first queried,
    because Spark plans it once. Call this again to see newer records. `bootstrap_servers` and errors are as in
    `read_topic`. Raises InvalidDataError where Spark takes the names of two topics for one. Also raises
    InvalidDataError, once all others have their views, with the topics that cannot be read and the reasons.
    """
    from spark_broker.client.admin import Admin
    from spark_broker.spark.spark_failures import of_spark, said

    servers = servers_of(spark, bootstrap_servers)
    made: list[str] = []
    failures: dict[str, str] = {}
    expected: tuple[type[Exception], ...] = (SparkBrokerError, *of_spark())
    with Admin(servers) as admin:
        names = admin.list_topics()
        if (spark.conf.get("spark.sql.caseSensitive", "false") or "").lower() != "true":
            _check_names(names)
        for name in names:
            try:
                read_topic(spark, name, bootstrap_servers=servers).createOrReplaceTempView(f"`{name}`")
            except expected as error:
                # The topic may have been deleted. Without brokers, this raises what ends it all.
                if name in admin.list_topics():
                    failures[name] = said(error)
            else:
                made.append(name)
    if failures:
        raise _without_views(failures)
    return made


def _without_views(failures: Mapping[str, str]) -> InvalidDataError:
    """`failures`: why a topic cannot be read, by its name."""
    shown = [f"{name}: {why}" for name, why in failures.items()][:SHOWN_MAX]
    more = f"; and {len(failures) - SHOWN_MAX} more" if len(failures) > SHOWN_MAX else ""
    return InvalidDataError(
        f"no view, or that of an earlier call, of {', '.join(failures)}. {'; '.join(shown)}{more}",
        hint="All other topics have their views. See to what the reasons say, and call create_views again.",
    )


def _check_names(names: Iterable[str]) -> None:
    """Raises InvalidDataError for names that differ in case only."""
    by_lower: dict[str, str] = {}
    for name in names:
        other = by_lower.setdefault(name.lower(), name)
        if other != name:
            raise InvalidDataError(
                f"Spark takes the topics {other!r} and {name!r} for one view: their names differ in case only",
                hint="Set spark.sql.caseSensitive to true, or use read_topic for these.",
            )


def servers_of(spark: SparkSession, bootstrap_servers: str | None) -> str:
    """The addresses to use. Raises InvalidConfigError when there are none, or when several clusters run here."""
    if not hasattr(spark, "readStream"):
        raise InvalidDataError(f"spark is {type(spark).__name__}; give a SparkSession")
    if bootstrap_servers is not None:
        return ",".join(AdminConfig.parse({"bootstrap.servers": bootstrap_servers}).bootstrap_servers)
    configured = spark.conf.get(SERVERS_SETTING, None)
    if configured:
        return configured
    from spark_broker.driver.cluster import BrokerCluster

    running = BrokerCluster.running()
    if len(running) != 1:
        situation = f"{len(running)} clusters run in this process" if running else "no cluster runs in this process"
        raise invalid_option(f"{situation}: give bootstrap_servers, or set {SERVERS_SETTING} in the session")
    return running[0].bootstrap_servers
