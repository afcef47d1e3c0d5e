"""Every setting, declared once: its name, type, default, bounds and documentation.

A setting is a field of one of the frozen classes below; its name is the field's with dots for underscores
(`min_insync_replicas` is `min.insync.replicas`). Names and defaults are Kafka's wherever Kafka has the setting; where a
default differs, the documentation of the setting says why. `python -m spark_broker.config` writes `conf/cluster.toml`
and `docs/configuration.md` from here, and a test compares them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from spark_broker.errors import InvalidConfigError
from spark_broker.pages import page
from spark_broker.ports import ports_of
from spark_broker.setting_values import KIND_NAMES, converted, in_error, named_once, to_text

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class Check:
    """Which values of a setting are allowed, in words and as a predicate."""

    allowed: str
    accepts: Callable[[Any], bool]


def at_least(low: int) -> Check:
    return Check(f"at least {low}", lambda value: value >= low)


def between(low: float, high: float) -> Check:
    return Check(f"from {low} to {high}", lambda value: low <= value <= high)


def one_of(*names: str) -> Check:
    return Check(f"one of {', '.join(name or '(empty)' for name in names)}", lambda value: value in names)


def ports() -> Check:
    return Check("empty, a port, or a range of ports such as 9092-9099", lambda text: ports_of(text) is not None)


LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def setting(default: Any, doc: str, check: Check | None = None) -> Any:
    """Declare a setting on a config class."""
    return dataclasses.field(default=default, metadata={"doc": doc, "check": check})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of the config classes: parsing of names and values, with errors that name the nearest known setting."""

    @classmethod
    def setting_names(cls) -> dict[str, str]:
        """Setting name to field name."""
        return {field.name.replace("_", "."): field.name for field in dataclasses.fields(cls)}

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> Self:
        """Settings by dotted name; strings are converted. Raises InvalidConfigError."""
        names, parsed = cls.setting_names(), dict[str, object]()
        for name, value in values.items():
            if name not in names:
                raise InvalidConfigError(unknown_setting(name, names))
            parsed[names[name]] = _convert(cls, names[name], value)
        return cls(**parsed)._naming(values)

    def with_values(self, values: Mapping[str, object]) -> Self:
        """A copy with these settings (dotted names) replaced."""
        changed, names = type(self).parse(values), self.setting_names()
        fields = {names[name]: getattr(changed, names[name]) for name in values}
        return dataclasses.replace(self, **fields)._naming({**self.given(), **values})

    def _naming(self, names: Iterable[str]) -> Self:
        """Note that somebody has given these, beside the fields: two configs with the same values stay equal."""
        self.__dict__["_named"] = frozenset(names)
        return self

    def given(self) -> dict[str, str]:
        """The settings that somebody has named, whatever they say, as text by dotted name. `parse` takes them back."""
        return {name: text for name, text in self.to_dict().items() if name in getattr(self, "_named", ())}

    def to_dict(self) -> dict[str, str]:
        """Every setting as text, by dotted name."""
        return {name: to_text(getattr(self, attribute)) for name, attribute in self.setting_names().items()}

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check: Check | None = field.metadata.get("check")
            value, name = getattr(self, field.name), field.name.replace("_", ".")
            if check is not None and not check.accepts(value):
                raise InvalidConfigError(f"{name} = {in_error(value)}: must be {check.allowed}")


def unknown_setting(name: str, known: Mapping[str, object] | list[str], what: str = "setting") -> str:
    """The message for an unknown name: it names the nearest known one."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"unknown {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _convert(cls: type[Config], attribute: str, value: object) -> object:
    default = next(f.default for f in dataclasses.fields(cls) if f.name == attribute)
    return converted(type(default), value, attribute.replace("_", "."))


PARAMETERS = ("acks", "bootstrap_servers", "group_id", "transactional_id")
"""Settings that clients take as parameters of their own."""

_KEYWORD_TYPES: dict[type, str] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    tuple: "tuple[str, ...]",
}


@dataclass(frozen=True, kw_only=True)
class TopicConfig(Config):
    """Settings of one topic. A cluster's `[topic]` table gives the defaults of topics created in it."""

    min_insync_replicas: int = setting(
        1, "With acks=all, refuse appends while fewer replicas than this are in sync.", at_least(1)
    )
    unclean_leader_election_enable: bool = setting(
        False,
        "Let any live replica lead when no replica that has all committed records is left. Records may be lost then, "
        "and offsets name other records than before; consumers get LOG_TRUNCATION.",
    )
    retention_ms: int = setting(
        604_800_000,
        "Delete segments whose newest append is older than this; -1 keeps them. With delta.path the last segment stays, and this deletes rows of the table, too, but only if it is set for the topic or in [topic]. The leader goes by its own clock: what another appended, or itself in an earlier leader epoch, it keeps for twice controller.clock.skew.fence.ms longer, since that clock may have been so far behind.",
        at_least(-1),
    )
    retention_bytes: int = setting(
        -1,
        "Delete the oldest sealed segments of a partition beyond this size; -1: no limit. With delta.path, what counts is the size that the records in the table had in the log.",
        at_least(-1),
    )
    cleanup_policy: tuple[str, ...] = setting(
        ("delete",),
        "`delete`: brokers delete old segments, by retention.*. `compact`: they keep the last record of each key (docs/compaction.md). `compact,delete`: both.",
        Check("delete, compact, or both", lambda value: bool(value) and set(value) <= {"delete", "compact"}),
    )
    min_cleanable_dirty_ratio: float = setting(
        0.5,
        "With compaction, compact a log when at least this share of its sealed bytes is new since the last time.",
        between(0, 1),
    )
    min_compaction_lag_ms: int = setting(
        0, "With compaction, leave a segment as it is for this long after its last append.", at_least(0)
    )
    max_compaction_lag_ms: int = setting(
        INT64_MAX,
        "With compaction, roll a segment this long after its first append, and compact it however small its share is.",
        at_least(1),
    )
    delete_retention_ms: int = setting(
        86_400_000,
        "With compaction, keep a tombstone for this long after the records that it deletes are gone. A consumer that reads a topic from its beginning within this time misses no deletion.",
        at_least(0),
    )
    segment_bytes: int = setting(
        1_073_741_824, "Roll a segment before it grows beyond this size.", between(1024, INT32_MAX)
    )
    segment_index_bytes: int = setting(
        1_048_576,
        "Roll a segment before its index grows beyond this size: 80 bytes for each micro-batch, which a broker keeps in "
        "memory while the segment is the newest. Kafka's default is 10 MiB.",
        between(1024, INT32_MAX),
    )
    segment_ms: int = setting(604_800_000, "Roll a segment this long after its first append.", at_least(1))
    max_message_bytes: int = setting(
        16_777_216,
        "Largest micro-batch that the topic takes. Kafka's default is 1 MiB; here the unit is a micro-batch of thousands "
        "of rows, so it is 16 MiB.",
        between(1, INT32_MAX),
    )
    flush_messages: int = setting(
        INT64_MAX,
        "Sync to disk after this many records, before they are acknowledged; 1 syncs every append.",
        at_least(1),
    )
    key_columns: tuple[str, ...] = setting(
        (),
        "Columns whose values choose the partition of a row (typed topics). Empty: no key, except the default schema's `key`.",
    )
    timestamp_column: str = setting("", "Column that holds the record's timestamp (typed topics). Empty: append time.")
    delta_path: str = setting(
        "",
        "Delta table that records are copied into, by the cluster or by `jobs/tier.py`: an absolute path, or any URL that "
        "Spark can write, without %, #, ? and backslashes. Then retention deletes only what is in the table. Empty: none.",
    )
    delta_commit_interval_ms: int = setting(
        60_000,
        "With delta.path: how often the cluster appends what is committed to the table, so that a record is there about so "
        "long after it was stored. -1: only whole segments, when `segment.bytes` or `segment.ms` has sealed them.",
        between(-1, INT32_MAX),
    )
    delta_type_widening: str = setting(
        "",
        "What tiering does with a column that became wider in the topic than it is in the table. Empty: it stops. `native`: "
        "the table gets Delta's type widening; deltalake cannot read it then. `rewrite`: the table is written anew.",
        one_of("", "native", "rewrite"),
    )
    storage_format: str = setting(
        "arrow",
        "`arrow`: brokers keep segments by local.retention.*. `delta`: they drop each one as soon as it is in the table of delta.path.",
        one_of("arrow", "delta"),
    )
    local_retention_ms: int = setting(
        -2,
        "With delta.path, in place of retention.ms for the brokers' files; -1 keeps them, -2: as retention.ms.",
        at_least(-2),
    )
    local_retention_bytes: int = setting(
        -2,
        "With delta.path, in place of retention.bytes for the brokers' files; -1: no limit, -2: as retention.bytes.",
        at_least(-2),
    )


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Config):
    """Settings of the cluster: its brokers and its controller."""

    log_dirs: str = setting(
        "",
        "Directory under which each broker keeps its own log directory. Empty: a directory for the application, removed at stop.",
    )
    metadata_dir: str = setting(
        "",
        "Directory (fsspec URL) of the metadata log. Empty: `metadata` under log.dirs. It must be reachable wherever the driver may start.",
    )
    broker_host: str = setting(
        "",
        "Address that brokers and the controller bind and advertise. Empty: 127.0.0.1 on local masters, the executor's address elsewhere.",
    )
    broker_ports: str = setting(
        "",
        "Ports that brokers listen on, such as 9092-9099, for firewalls: each takes the one that it had last, or the first that is free on its machine. Empty: any port.",
        ports(),
    )
    driver_ports: str = setting(
        "",
        "Ports that the driver's machine listens on for brokers, such as 9100-9101: one for the controller, one for the launcher. Empty: any.",
        ports(),
    )
    broker_rack: str = setting(
        "", "Rack of every broker that this application starts (a failure domain above the host)."
    )
    num_partitions: int = setting(1, "Partitions of a topic that does not say.", at_least(1))
    default_replication_factor: int = setting(
        0,
        "Replication factor of a topic that does not say. 0: the number of brokers at the start of the cluster, and 3 at most; 1 on `local` masters, whose brokers share one executor. Kafka's default is 1; here executors come and go.",
        at_least(0),
    )
    broker_heartbeat_interval_ms: int = setting(
        500, "A broker's heartbeats to the controller. Kafka's default is 2000.", between(10, INT32_MAX)
    )
    broker_session_timeout_ms: int = setting(
        9000,
        "Fence a broker that has not been heard of for this long. A broken session fences sooner.",
        between(100, INT32_MAX),
    )
    controller_reconnect_grace_ms: int = setting(
        300,
        "Wait this long for the same incarnation after a session broke while its port still answers.",
        between(0, INT32_MAX),
    )
    controller_clock_skew_warn_ms: int = setting(
        5000,
        "Warn when a broker's clock is further than this from most of the cluster's. Synchronized clocks (NTP) differ by milliseconds.",
        between(1000, INT32_MAX),
    )
    controller_clock_skew_fence_ms: int = setting(
        60_000,
        "Fence a broker whose clock is further than this from most of the cluster's, until it is within controller.clock.skew.warn.ms. Leaders' clocks give records their times, and retention goes by them.",
        between(1000, INT32_MAX),
    )
    replica_lag_time_max_ms: int = setting(
        30_000, "Remove a follower from the ISR when it has not caught up for this long.", between(100, INT32_MAX)
    )
    replica_fetch_wait_max_ms: int = setting(500, "Longest wait of a follower's fetch.", between(1, 60_000))
    replica_fetch_max_bytes: int = setting(
        4_194_304, "Bytes of one partition in a follower's fetch. Kafka's default is 1 MiB.", between(1024, INT32_MAX)
    )
    replica_fetch_response_max_bytes: int = setting(
        16_777_216, "Bytes of one follower's fetch. Kafka's default is 10 MiB.", between(1024, INT32_MAX)
    )
    log_dir_room_bytes: int = setting(
        67_108_864,
        "A broker whose disk was full counts as one with room again when this much of it is free. Until then it leads only what no other in-sync replica can lead.",
        at_least(0),
    )
    replica_high_watermark_checkpoint_interval_ms: int = setting(
        5000, "How often high watermarks are saved.", between(10, INT32_MAX)
    )
    replica_reassignment_delay_ms: int = setting(
        30_000,
        "Move the replicas of a broker that is gone for this long to live brokers; -1: never.",
        between(-1, INT32_MAX),
    )
    cluster_loss_delay_ms: int = setting(
        60_000,
        "When none of the brokers that had replicas is back this long after a start, while others are live, their disks count as lost: topics with a history go on at its end, and internal topics begin empty. Other topics wait for an operator. -1: all do.",
        between(-1, INT32_MAX),
    )
    replica_reassignment_max_partitions: int = setting(
        10, "Self-healing moves at most this many partitions at once (throttle).", at_least(1)
    )
    num_recovery_threads_per_data_dir: int = setting(
        4,
        "Threads that make the logs of a new topic, or open those that are there after a crash. Kafka's default is 2.",
        between(1, 64),
    )
    log_retention_check_interval_ms: int = setting(300_000, "How often retention is applied.", between(10, INT32_MAX))
    log_stray_retention_ms: int = setting(
        604_800_000,
        "How long a broker keeps a replica that it has set aside, because the metadata does not know it. "
        "-1: until somebody deletes it.",
        at_least(-1),
    )
    log_cleaner_enable: bool = setting(True, "Whether brokers compact topics with `cleanup.policy=compact`.")
    log_cleaner_backoff_ms: int = setting(
        15_000, "How long a broker that has nothing to compact waits before it looks again.", between(10, INT32_MAX)
    )
    log_cleaner_dedupe_buffer_size: int = setting(
        134_217_728,
        "Bytes of keys that a broker holds while it compacts a log. A log with more new keys is compacted in several passes.",
        at_least(1024),
    )
    log_cleaner_io_max_bytes_per_second: int = setting(
        INT64_MAX, "Compaction reads and writes at most so many bytes a second.", at_least(1024)
    )
    tiering_interval_ms: int = setting(
        300_000,
        "How often the cluster tiers each topic with a `delta.path` whether it has new records or not: then retention deletes from its table, too. New records are appended after `delta.commit.interval.ms` of their topic. -1: the cluster has no schedule of its own.",
        between(-1, INT32_MAX),
    )
    log_flush_interval_ms: int = setting(
        60_000,
        "How often open segments are synced in the background. Kafka leaves this to the system.",
        between(10, INT32_MAX),
    )
    leader_imbalance_check_interval_ms: int = setting(
        300_000,
        "How often the controller considers preferred-leader election (Kafka: leader.imbalance.check.interval.seconds).",
        between(10, INT32_MAX),
    )
    auto_leader_rebalance_enable: bool = setting(
        True, "Give partitions back to their preferred leaders from time to time."
    )
    leader_imbalance_per_broker_percentage: int = setting(
        10, "Rebalance when more than this share of a broker's preferred partitions is led elsewhere.", between(0, 100)
    )
    offsets_topic_num_partitions: int = setting(
        50, "Partitions of __consumer_offsets, when it is first made.", between(1, 1000)
    )
    offsets_topic_replication_factor: int = setting(
        3, "Replication factor of __consumer_offsets; with fewer brokers their number, until more come.", at_least(1)
    )
    offsets_topic_segment_bytes: int = setting(
        104_857_600,
        "segment.bytes of __consumer_offsets, when it is first made. A group's commit has to fit into a segment.",
        between(1024, INT32_MAX),
    )
    offsets_retention_minutes: int = setting(
        7 * 24 * 60,
        "Forget the offsets of a group that has had no member, and has committed nothing, for this long.",
        between(1, INT32_MAX),
    )
    group_max_size: int = setting(1000, "Members that a consumer group may have.", between(1, INT32_MAX))
    group_min_session_timeout_ms: int = setting(
        1000, "Smallest session.timeout.ms that a consumer may ask for. Kafka's default is 6000.", between(1, INT32_MAX)
    )
    group_max_session_timeout_ms: int = setting(
        1_800_000, "Largest session.timeout.ms that a consumer may ask for.", between(1, INT32_MAX)
    )
    group_consumer_heartbeat_interval_ms: int = setting(
        5000, "How often the members of a group that is at rest send a heartbeat, at most.", between(10, INT32_MAX)
    )
    transaction_state_log_num_partitions: int = setting(
        50, "Partitions of __transaction_state, when it is first made.", between(1, 1000)
    )
    transaction_state_log_replication_factor: int = setting(
        3, "Replication factor of __transaction_state; with fewer brokers their number, until more come.", at_least(1)
    )
    transaction_state_log_min_isr: int = setting(
        2, "min.insync.replicas of __transaction_state, when it is first made.", at_least(1)
    )
    transaction_state_log_segment_bytes: int = setting(
        104_857_600, "segment.bytes of __transaction_state, when it is first made.", between(1024, INT32_MAX)
    )
    transaction_max_timeout_ms: int = setting(
        900_000, "Largest transaction.timeout.ms that a client may ask for.", between(1, INT32_MAX)
    )
    transactional_id_expiration_ms: int = setting(
        -1,
        "Forget a transactional id that has been idle for this long; -1: never, so that a version is never committed twice. Kafka's default is 7 days.",
        at_least(-1),
    )
    producer_id_expiration_ms: int = setting(
        86_400_000,
        "A partition forgets a producer that has appended nothing for this long (and twice controller.clock.skew.fence.ms: another leader may have noted when). Keep it above delivery.timeout.ms of every producer. One whose last transaction has ended is forgotten after 2 minutes (and as much).",
        at_least(120_000),  # core.leadership: a coordinator's confirmation lasts a minute, and must end before this
    )
    producer_id_expiration_check_interval_ms: int = setting(
        600_000, "How often partitions look for producers to forget.", between(1, INT32_MAX)
    )
    metadata_log_max_records_between_snapshots: int = setting(
        1000, "Records of the metadata log after which a snapshot is written.", at_least(1)
    )
    metadata_max_snapshots: int = setting(2, "Snapshots of the metadata log that are kept.", at_least(1))
    request_timeout_ms: int = setting(
        30_000, "Deadline of requests between brokers and controller.", between(100, INT32_MAX)
    )
    fetch_max_bytes: int = setting(
        57_671_680,
        "Bytes of the answer to one fetch, whatever the client asks for; one batch is returned even if larger.",
        at_least(1024),
    )
    socket_request_max_bytes: int = setting(
        104_857_600,
        "Largest message that a broker takes. A larger one is refused before it is received.",
        at_least(1024),
    )
    queued_max_request_bytes: int = setting(
        268_435_456,
        "Bytes of requests that a broker has received and not worked on yet, of clients and of brokers each. Beyond it, connections are not read until there is room.",
        at_least(1024),
    )
    broker_max_connections: int = setting(
        10_000,
        "Connections that a broker accepts; more are closed at once. So many streams of clients are open at a time, too.",
        between(1, INT32_MAX),
    )
    max_connections_per_ip: int = setting(
        10_000, "Connections that a broker accepts from one address; more are closed at once.", between(1, INT32_MAX)
    )
    connections_max_idle_ms: int = setting(
        600_000,
        "A connection that is used for no call and no stream is closed after so long.",
        between(1000, INT32_MAX),
    )
    socket_send_timeout_ms: int = setting(
        30_000, "A client that takes nothing of an answer for this long is disconnected.", between(100, INT32_MAX)
    )
    fetch_answers_max_bytes: int = setting(
        134_217_728,
        "Bytes of answers to clients' fetches that a broker holds at a time. An answer gets at most half of what is free.",
        at_least(131_072),
    )
    num_io_threads: int = setting(
        4,
        "Requests of clients that a broker works on at a time; the others wait for their turn. Followers and the controller never wait for it. Kafka's default is 8; here each takes turns with the followers at Python's interpreter.",
        at_least(1),
    )
    queued_max_requests: int = setting(
        500,
        "Requests of clients that may wait for their turn, of calls, appends and fetches each; more are answered THROTTLING_QUOTA_EXCEEDED, which clients obey by waiting. Also appends that may wait on one connection before reading from it stops.",
        at_least(1),
    )
    broker_start_timeout_ms: int = setting(
        120_000, "How long BrokerCluster.start waits for its brokers.", between(1000, INT32_MAX)
    )
    broker_adoption_timeout_ms: int = setting(
        300_000,
        "How long a broker goes on without the Spark task that keeps it, which Spark or a user may cancel at any time; then it stops in order. -1: for ever.",
        between(-1, INT32_MAX),
    )
    log_level: str = setting(
        "",
        "Level of the controller's log, which is part of the driver's, and of the brokers', which are the executors' stderr: DEBUG, INFO, WARNING or ERROR. Empty: INFO; on local[N] the brokers' is WARNING then, since their executor is your own process.",
        one_of("", *LOG_LEVELS),
    )
    log_format: str = setting(
        "text",
        "How the brokers, and the driver of `spark-broker cluster start`, write their logs: text for people, or json, one object a line with the fields of each event (topic_partition, leader_epoch, offset, why and others). In your own driver the format is your logging's; the fields are there too (docs/troubleshooting.md).",
        one_of(*LOG_FORMATS),
    )
    broker_executor_resource: bool = setting(
        False,
        "Ask for one `broker` resource per broker (only where the workers declare it; otherwise no executor starts).",
    )
    controlled_shutdown_timeout_ms: int = setting(
        15_000, "How long a controlled shutdown may take before the broker is ended by force.", between(100, INT32_MAX)
    )

    @property
    def controller_log_level(self) -> str:
        return self.log_level or "INFO"

    def broker_log_level(self, *, shares_terminal: bool) -> str:
        """`shares_terminal`: the executor is the driver's own JVM (`local[N]`)."""
        return self.log_level or ("WARNING" if shares_terminal else "INFO")


@dataclass(frozen=True, kw_only=True)
class ProducerConfig(Config):
    """Settings of a Producer."""

    bootstrap_servers: tuple[str, ...] = setting(
        (), "Brokers to ask for metadata first, `host:port`; any one is enough."
    )
    client_id: str = setting("", "Name of this client in logs and errors.")
    acks: str = setting(
        "all", "0: do not wait; 1: the leader; all: every in-sync replica.", one_of("0", "1", "all", "-1")
    )
    enable_idempotence: bool = setting(
        True, "Number the batches so that a retry stores nothing twice. Off with acks other than all."
    )
    transactional_id: str = setting(
        "", "Name of the producer's transactions. One process at a time may use it: a newer one fences the older."
    )
    transaction_timeout_ms: int = setting(
        60_000,
        "The coordinator aborts a transaction in which nothing has happened for this long.",
        between(1, INT32_MAX),
    )
    linger_ms: int = setting(
        5, "`send` waits this long for more records before it appends a batch.", between(0, INT32_MAX)
    )
    batch_size: int = setting(
        262_144,
        "`send` appends a batch when its records reach this many bytes. Kafka's default is 16384; here a batch costs more "
        "and a record less.",
        at_least(0),
    )
    buffer_memory: int = setting(
        33_554_432, "Bytes that may wait to be acknowledged; then append blocks.", at_least(1024)
    )
    max_block_ms: int = setting(
        60_000,
        "How long `append` and `send` may block the caller: for metadata of the topic, for a producer id, and for room in "
        "buffer.memory. The Future fails then.",
        between(0, INT32_MAX),
    )
    max_in_flight_requests_per_connection: int = setting(5, "Unacknowledged batches of one partition.", between(1, 5))
    compression_type: str = setting("none", "Compression of the Arrow buffers.", one_of("none", "lz4", "zstd"))
    delivery_timeout_ms: int = setting(
        120_000, "Time after which an append that is not acknowledged fails.", between(1, INT32_MAX)
    )
    request_timeout_ms: int = setting(30_000, "Deadline of one request; then it is sent again.", between(1, INT32_MAX))
    retry_backoff_ms: int = setting(
        50, "Wait before a retry; it doubles up to retry.backoff.max.ms. Kafka's default is 100.", between(1, INT32_MAX)
    )
    retry_backoff_max_ms: int = setting(1000, "Longest wait before a retry.", between(1, INT32_MAX))
    metadata_max_age_ms: int = setting(300_000, "Metadata older than this is fetched again.", between(1, INT32_MAX))


@dataclass(frozen=True, kw_only=True)
class ConsumerConfig(Config):
    """Settings of a Consumer."""

    bootstrap_servers: tuple[str, ...] = setting(
        (), "Brokers to ask for metadata first, `host:port`; any one is enough."
    )
    client_id: str = setting("", "Name of this client in logs and errors.")
    group_id: str = setting("", "Group under whose name offsets are committed. Empty: none.")
    group_instance_id: str = setting(
        "",
        "Name of this process in its group (a static member): when it comes back within session.timeout.ms, it gets its partitions again, and no others move. Empty: none.",
    )
    group_remote_assignor: str = setting(
        "",
        "How the group shares partitions: uniform (evenly, and with as few moves as possible) or range (the same numbers of each topic together). Empty: the cluster's default, uniform.",
        one_of("", "uniform", "range"),
    )
    client_rack: str = setting("", "Rack of this consumer: partitions with a replica there are preferred. Empty: none.")
    session_timeout_ms: int = setting(
        45_000, "A member that its group has not heard of for this long is removed.", between(1, INT32_MAX)
    )
    max_poll_interval_ms: int = setting(
        300_000,
        "Longest time between two polls. After it, the consumer leaves its group, and others get its partitions.",
        between(1, INT32_MAX),
    )
    isolation_level: str = setting(
        "read_committed",
        "read_committed: only records of committed transactions (and of none), up to the last stable offset; read_uncommitted: all. Kafka's default is read_uncommitted.",
        one_of("read_committed", "read_uncommitted"),
    )
    auto_offset_reset: str = setting(
        "latest",
        "Where to start without a committed offset, or when it is out of range.",
        one_of("earliest", "latest", "none"),
    )
    enable_auto_commit: bool = setting(
        True, "Commit the positions of what poll handed out, from time to time and at close."
    )
    auto_commit_interval_ms: int = setting(
        5000, "How often positions are committed automatically.", between(1, INT32_MAX)
    )
    fetch_min_bytes: int = setting(1, "Bytes that a fetch waits for, up to fetch.max.wait.ms.", between(1, INT32_MAX))
    fetch_max_wait_ms: int = setting(500, "Longest wait of a fetch.", between(0, 60_000))
    fetch_max_bytes: int = setting(52_428_800, "Bytes of one fetch; a larger batch comes, too.", between(1, INT32_MAX))
    max_partition_fetch_bytes: int = setting(
        4_194_304,
        "Bytes of one partition in a fetch; one batch is returned even if larger. Kafka's default is 1 MiB.",
        between(1, INT32_MAX),
    )
    request_timeout_ms: int = setting(30_000, "Deadline of one request; then it is sent again.", between(1, INT32_MAX))
    default_api_timeout_ms: int = setting(
        60_000, "Deadline of commit, position and other calls.", between(1, INT32_MAX)
    )
    retry_backoff_ms: int = setting(
        50, "Wait before a retry; it doubles up to retry.backoff.max.ms. Kafka's default is 100.", between(1, INT32_MAX)
    )
    retry_backoff_max_ms: int = setting(1000, "Longest wait before a retry.", between(1, INT32_MAX))
    metadata_max_age_ms: int = setting(300_000, "Metadata older than this is fetched again.", between(1, INT32_MAX))

    @property
    def read_committed(self) -> bool:
        return self.isolation_level == "read_committed"


@dataclass(frozen=True, kw_only=True)
class AdminConfig(Config):
    """Settings of an Admin."""

    bootstrap_servers: tuple[str, ...] = setting((), "Brokers to ask first, `host:port`; any one is enough.")
    request_timeout_ms: int = setting(30_000, "Deadline of one request.", between(1, INT32_MAX))
    default_api_timeout_ms: int = setting(60_000, "Deadline of a call, with its retries.", between(1, INT32_MAX))
    retry_backoff_ms: int = setting(
        50, "Wait before a retry; it doubles up to retry.backoff.max.ms. Kafka's default is 100.", between(1, INT32_MAX)
    )
    retry_backoff_max_ms: int = setting(1000, "Longest wait before a retry.", between(1, INT32_MAX))
    metadata_max_age_ms: int = setting(300_000, "Metadata older than this is fetched again.", between(1, INT32_MAX))


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """What `conf/cluster.toml` holds: the `[cluster]` table and the `[topic]` defaults."""

    cluster: ClusterConfig
    topic: TopicConfig


def load_cluster_settings(source: Mapping[str, object] | str | Path | None) -> ClusterSettings:
    """Settings from a TOML file or from a mapping of dotted names (cluster and topic settings may be mixed in it).

    Raises InvalidConfigError; the message names the nearest known setting.
    """
    if source is None:
        return ClusterSettings(cluster=ClusterConfig(), topic=TopicConfig())
    if isinstance(source, Mapping):
        return _split(source)
    path = Path(source)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise InvalidConfigError(
            f"the configuration file {path} does not exist",
            hint=f"Give the path of a TOML file; what it may have: {page('configuration')}.",
        ) from None
    except OSError as error:
        why = f"the configuration file {str(path)!r} cannot be read: {error.strerror}"
        raise InvalidConfigError(why, hint="Give the path of a TOML file.") from None
    except (ValueError, RecursionError) as error:  # not TOML, or a number or a depth that Python does not take
        what = " is not UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise InvalidConfigError(f"{path}{what}: {error}") from None
    return _from_tables(tables)


def _split(values: Mapping[str, object]) -> ClusterSettings:
    topic_names, cluster_names = TopicConfig.setting_names(), ClusterConfig.setting_names()
    unknown = [name for name in values if name not in topic_names and name not in cluster_names]
    if unknown:
        raise InvalidConfigError(unknown_setting(unknown[0], {**cluster_names, **topic_names}))
    return ClusterSettings(
        cluster=ClusterConfig.parse({k: v for k, v in values.items() if k in cluster_names}),
        topic=TopicConfig.parse({k: v for k, v in values.items() if k in topic_names}),
    )


def _outside_of_tables(name: str, value: object) -> str:
    """The message for a name outside of [cluster] and [topic]: most often a setting above the first table."""
    stray = next(iter(_flatten({name: value})), name)
    for table, names in (("cluster", ClusterConfig.setting_names()), ("topic", TopicConfig.setting_names())):
        if stray in names:
            return f"{stray!r} stands in no table; it belongs below [{table}]"
    return unknown_setting(name, ["cluster", "topic"], "table")


def _from_tables(tables: Mapping[str, object]) -> ClusterSettings:
    for name, table in tables.items():
        if name not in ("cluster", "topic"):
            raise InvalidConfigError(_outside_of_tables(name, table))
        if not isinstance(table, Mapping):
            raise InvalidConfigError(f"[{name}] must be a table")
    cluster = cast("Mapping[str, object]", tables.get("cluster", {}))
    topic = cast("Mapping[str, object]", tables.get("topic", {}))
    return ClusterSettings(cluster=ClusterConfig.parse(_flatten(cluster)), topic=TopicConfig.parse(_flatten(topic)))


def _flatten(table: Mapping[str, object]) -> dict[str, object]:
    """TOML reads `a.b = 1` as nested tables, but not `"a.b" = 1`; settings are dotted names. Raises InvalidConfigError."""
    return named_once(_dotted(table, ""))


def _dotted(table: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _toml_value(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def sample_toml() -> str:
    """The text of `conf/cluster.toml`: every setting, commented out, at its default."""
    lines = ["# Generated by `python -m spark_broker.config`. Uncomment a line to change its setting.", ""]
    for title, cls in (("cluster", ClusterConfig), ("topic", TopicConfig)):
        lines += [f"[{title}]"]
        for field in dataclasses.fields(cls):
            lines += [
                f"# {field.metadata['doc']}",
                f"#{field.name.replace('_', '.')} = {_toml_value(field.default)}",
                "",
            ]
    return "\n".join(lines).rstrip() + "\n"


def reference_markdown() -> str:
    """The text of `docs/configuration.md`."""
    lines = [
        "# Configuration",
        "",
        "Generated by `python -m spark_broker.config`. Names and defaults are Kafka's wherever Kafka has the setting.",
    ]
    for cls in (ClusterConfig, TopicConfig, ProducerConfig, ConsumerConfig, AdminConfig):
        title = cls.__name__.removesuffix("Config")
        lines += [
            "",
            f"## {title}",
            "",
            (cls.__doc__ or "").strip(),
            "",
            "| Setting | Type | Default | Allowed | Meaning |",
            "|---|---|---|---|---|",
        ]
        for field in dataclasses.fields(cls):
            kind = KIND_NAMES[type(field.default)]
            default = f"`{to_text(field.default)}`" if to_text(field.default) else "(empty)"
            check: Check | None = field.metadata.get("check")
            allowed = "" if check is None else check.allowed
            name = field.name.replace("_", ".")
            lines.append(f"| `{name}` | {kind} | {default} | {allowed} | {field.metadata['doc']} |")
    return "\n".join(lines) + "\n"


def keywords_module() -> str:
    """The text of `client/keywords.py`: the settings of each client, for editors and type checkers."""
    lines = [
        '"""The settings that clients take as keywords. Generated by `python -m spark_broker.config`."""',
        "",
        "from __future__ import annotations",
        "",
        "from typing import TypedDict",
    ]
    for cls in (AdminConfig, ConsumerConfig, ProducerConfig):
        settings = cls.__name__.removesuffix("Config") + "Settings"
        lines += ["", "", f"class {settings}(TypedDict, total=False):", f'    """{cls.__doc__}"""', ""]
        fields = [field for field in dataclasses.fields(cls) if field.name not in PARAMETERS]
        lines += [f"    {field.name}: {_KEYWORD_TYPES[type(field.default)]} | None" for field in fields]
    return "\n".join(lines) + "\n"


def write_generated(root: Path) -> list[Path]:
    """Write the generated files under the project's root; returns their paths."""
    files = {
        root / "conf" / "cluster.toml": sample_toml(),
        root / "docs" / "configuration.md": reference_markdown(),
        root / "spark_broker" / "client" / "keywords.py": keywords_module(),
    }
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return list(files)


if __name__ == "__main__":
    write_generated(Path(__file__).resolve().parent.parent)
