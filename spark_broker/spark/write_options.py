"""The options of a write: those of Spark's Kafka sink, those of a transaction, of a topic to create, and a producer's.

Case does not count in a name, because Spark hands names on in lower case.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from spark_broker.config import ProducerConfig, TopicConfig
from spark_broker.digits import digits
from spark_broker.spark.refusals import invalid_option

OPTIONS = (
    *("topic", "path", "transactional", "txnAppId", "txnVersion"),
    *("createTopic", "topic.partitions", "topic.replication.factor"),
)

WITHOUT_EFFECT = (
    "includeHeaders",  # The column `headers` is written if there is one.
    *("checkpointLocation", "queryName"),  # They belong to the stream. Spark hands them on.
    *("linger.ms", "batch.size"),  # They are for `send`. A write appends whole batches.
)
"""Options that a job may keep when it changes the format from Kafka's, or that are Spark's own."""

_SET_BY_THE_SINK = {
    "acks": ("all", "-1"),
    "enable.idempotence": ("true",),
}
"""Settings of a producer that must have these values in a write."""

PRODUCER_PREFIX = "kafka."
TOPIC_PREFIX = "topic."
VERSION_MAX = 2**63 - 1

TRANSACTION_TIMEOUT_MS = 900_000
"""The time-out of a TransactionGroup: an attempt may be silent for this long."""


@dataclass(frozen=True)
class TopicToCreate:
    """What `createTopic=true` gives a topic that does not exist. None: the cluster's default."""

    partitions: int | None
    replication_factor: int | None
    config: Mapping[str, str]


@dataclass(frozen=True)
class Idempotence:
    """`txnAppId` and `txnVersion`. A version at or below the application's last one is not written again."""

    app_id: str
    version: int


@dataclass(frozen=True)
class WriteOptions:
    """A write. `topic` None: each row names its own in the column `topic`. `settings` are a producer's."""

    topic: str | None
    settings: Mapping[str, str]
    producer: ProducerConfig
    transactional: bool
    idempotence: Idempotence | None
    transaction_timeout_ms: int
    create: TopicToCreate | None


def parse_write_options(options: Mapping[str, str]) -> WriteOptions:
    """The write that these options describe. Raises InvalidConfigError. For an unknown option, the error names the
    nearest known one.
    """
    values, settings, topic_settings = _sorted_out(options)
    transactional = _flag(values, "transactional", default=True)
    idempotence = _idempotence(values)
    if idempotence is not None and not transactional:
        raise invalid_option("txnAppId needs a transaction: leave out transactional=false")
    timeout_ms = settings.pop("transaction.timeout.ms", str(TRANSACTION_TIMEOUT_MS))
    return WriteOptions(
        topic=_topic(values),
        settings=settings,
        producer=ProducerConfig.parse(settings),
        transactional=transactional,
        idempotence=idempotence,
        transaction_timeout_ms=_number("transaction.timeout.ms", timeout_ms, low=1),
        create=_topic_to_create(values, topic_settings),
    )


def _sorted_out(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Options by canonical name, a producer's settings without their prefix, a new topic's without theirs."""
    canonical = {name.lower(): name for name in OPTIONS}
    ignored = {name.lower() for name in WITHOUT_EFFECT}
    of_topics = {TOPIC_PREFIX + name: name for name in TopicConfig.setting_names()}
    values: dict[str, str] = {}
    settings: dict[str, str] = {}
    topic_settings: dict[str, str] = {}
    for given, value in options.items():
        name = given.lower()
        setting = name.removeprefix(PRODUCER_PREFIX)
        if name in ignored or setting in ignored:
            continue
        if name in canonical:
            values[canonical[name]] = value
        elif name in of_topics:
            topic_settings[of_topics[name]] = value
        elif setting in ProducerConfig.setting_names():
            _check_setting(setting, value)
            if settings.setdefault(setting, value) != value:
                raise invalid_option(f"{setting} and {PRODUCER_PREFIX}{setting} differ; give one of them")
        else:
            raise invalid_option(_unknown(name, list(of_topics)))
    if not settings.get("bootstrap.servers", "").strip():
        raise invalid_option("bootstrap.servers is missing; give one `host:port` or more of the cluster's brokers")
    return values, settings, topic_settings


def _check_setting(setting: str, value: str) -> None:
    if setting == "transactional.id":
        raise invalid_option("a write has many producers: txnAppId and txnVersion make a re-run of it idempotent")
    allowed = _SET_BY_THE_SINK.get(setting)
    if allowed is not None and value.strip().lower() not in allowed:
        raise invalid_option(f"{setting} = {value!r}: a write always has {setting} = {allowed[0]}")


def _unknown(name: str, of_topics: list[str]) -> str:
    """Options arrive in lower case, so the nearest name is looked for in lower case. The error shows it as it is
    documented.
    """
    settings = set(ProducerConfig.setting_names()) - {"transactional.id"}
    shown = {name.lower(): name for name in (*OPTIONS, *of_topics, *settings)}
    shown.update({PRODUCER_PREFIX + setting: PRODUCER_PREFIX + setting for setting in settings})
    near = difflib.get_close_matches(name, list(shown), n=1, cutoff=0.4)
    return f"unknown option {name!r} of a write" + (f"; did you mean {shown[near[0]]!r}?" if near else "")


def _topic(values: Mapping[str, str]) -> str | None:
    """`option("topic", "t")` or `save("t")`."""
    topic = values.get("topic", values.get("path"))
    if topic is None:
        return None
    if values.get("path", topic) != topic:
        raise invalid_option(f"topic = {topic!r} and save({values['path']!r}) differ; give one of them")
    if not topic.strip():
        raise invalid_option("topic is empty")
    return topic.strip()


def _idempotence(values: Mapping[str, str]) -> Idempotence | None:
    given = [name for name in ("txnAppId", "txnVersion") if name in values]
    if not given:
        return None
    if len(given) == 1:
        raise invalid_option(f"{given[0]} needs {'txnVersion' if given[0] == 'txnAppId' else 'txnAppId'} beside it")
    if not values["txnAppId"].strip():
        raise invalid_option("txnAppId is empty")
    return Idempotence(values["txnAppId"].strip(), _number("txnVersion", values["txnVersion"], low=0))


def _topic_to_create(values: Mapping[str, str], settings: Mapping[str, str]) -> TopicToCreate | None:
    if not _flag(values, "createTopic", default=False):
        unused = [name for name in ("topic.partitions", "topic.replication.factor") if name in values]
        unused += [TOPIC_PREFIX + name for name in settings]
        if unused:
            raise invalid_option(f"{unused[0]} needs createTopic=true: a topic that exists is not changed")
        return None
    if _topic(values) is None:
        raise invalid_option("createTopic needs the option topic: a column's topics are not created")
    TopicConfig.parse(settings)
    return TopicToCreate(_count(values, "topic.partitions"), _count(values, "topic.replication.factor"), settings)


def _count(values: Mapping[str, str], name: str) -> int | None:
    text = values.get(name)
    return None if text is None else _number(name, text, low=1)


def _number(name: str, text: str, *, low: int) -> int:
    number = digits(text)
    if number is None or not low <= number <= VERSION_MAX:
        raise invalid_option(f"{name} = {text!r} is not a number from {low} on")
    return number


def _flag(values: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = values.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        raise invalid_option(f"{name} = {values[name]!r} is neither true nor false")
    return text == "true"
