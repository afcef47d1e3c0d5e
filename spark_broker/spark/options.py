"""The options of a read: those of Spark's Kafka source, a few more, and the settings of a consumer.

Case does not count in a name, because Spark hands names on in lower case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_broker.config import ConsumerConfig, unknown_setting
from spark_broker.digits import digits
from spark_broker.spark.bounds import Bound, parse_end, parse_start
from spark_broker.spark.limits import Limits, checked, parse_duration_ms
from spark_broker.spark.option_table import DEFAULTS, INTERNAL, OPTIONS, WITHOUT_EFFECT, Query
from spark_broker.spark.ranges import TaskRules, TaskSize
from spark_broker.spark.refusals import invalid_option
from spark_broker.spark.selection import Selection, parse_selection

_SET_BY_THE_SOURCE = {
    "auto.offset.reset": "use startingOffsets",
    "enable.auto.commit": "a read commits nothing",
    "auto.commit.interval.ms": "a read commits nothing",
}

PREFIX = "kafka."


@dataclass(frozen=True)
class ReadOptions:
    """A read. `settings` are those of the consumers that carry it out.

    `end` counts in a batch query, `limits`, `group` (empty: none) and `ranges` in a streaming query.
    """

    selection: Selection
    start: Bound
    end: Bound
    settings: ConsumerConfig
    tasks: TaskRules
    latest_if_no_timestamp: bool = False
    include_headers: bool = False
    include_leader_epoch: bool = False
    fail_on_data_loss: bool = True
    local_reads: bool = True
    columns: tuple[str, ...] | None = None
    limits: Limits = field(default_factory=Limits)
    group: str = ""
    ranges: bool = False
    topic_id: str = ""
    other_partitions: str = "none"


def parse_options(options: Mapping[str, str], query: Query = Query.BATCH) -> ReadOptions:
    """The read that these options describe. For a query of either kind, it accepts what either of the two accepts.

    Raises InvalidConfigError. For an unknown option, the error names the nearest known one.
    """
    values, settings = _sorted_out(options)
    return ReadOptions(
        selection=parse_selection(values),
        start=parse_start(values, query),
        end=parse_end(values, query),
        settings=ConsumerConfig.parse(settings),
        latest_if_no_timestamp=_strategy(values) == "latest",
        tasks=_tasks(values),
        include_headers=_flag(values, "includeHeaders"),
        include_leader_epoch=_flag(values, "includeLeaderEpoch"),
        fail_on_data_loss=_flag(values, "failOnDataLoss"),
        local_reads=_flag(values, "localReads"),
        columns=_columns(values),
        limits=_limits(values),
        group=_group(values),
        ranges=_flag(values, "ranges"),
        topic_id=values.get("topicId", ""),
        other_partitions=values.get("otherPartitions", DEFAULTS["otherPartitions"].default),
    )


def _sorted_out(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Options by canonical name, and consumer settings without their prefix."""
    canonical = {name.lower(): name for name in (*OPTIONS, *(option.name for option in INTERNAL))}
    ignored = {name.lower() for name in WITHOUT_EFFECT}
    allowed = set(ConsumerConfig.setting_names()) - {*_SET_BY_THE_SOURCE, "group.id"}
    values: dict[str, str] = {}
    settings: dict[str, str] = {}
    for given, value in options.items():
        name = given.lower()
        if name == "provider" or name.startswith("option."):
            # CREATE TABLE would succeed, but every query of the table would come without these options.
            raise invalid_option("use CREATE TEMPORARY VIEW ... USING spark_broker, not CREATE TABLE")
        setting = name.removeprefix(PREFIX)
        if name in canonical:
            values[canonical[name]] = value
        elif setting in allowed:
            if settings.setdefault(setting, value) != value:
                raise invalid_option(f"{setting} and {PREFIX}{setting} differ; give one of them")
        elif setting in _SET_BY_THE_SOURCE:
            raise invalid_option(f"{name} is set by the source: {_SET_BY_THE_SOURCE[setting]}")
        elif name not in ignored:
            raise invalid_option(_unknown(name, [*OPTIONS, *allowed]))
    if "bootstrap.servers" not in settings:
        raise invalid_option("bootstrap.servers is missing; give one `host:port` or more of the cluster's brokers")
    return values, settings


def _unknown(name: str, known: list[str]) -> str:
    """Options arrive in lower case, so the nearest name is looked for in lower case. The error shows it as it is
    documented.
    """
    shown = {name.lower(): name for name in known}
    shown.update({PREFIX + name.lower(): PREFIX + name for name in known if "." in name})
    message = unknown_setting(name, list(shown), "option")
    for lower, option in shown.items():
        if message.endswith(f"did you mean {lower!r}?"):
            return message.replace(f"did you mean {lower!r}?", f"did you mean {option!r}?")
    return message


def _strategy(values: Mapping[str, str]) -> str:
    name = "startingOffsetsByTimestampStrategy"
    value = values.get(name, DEFAULTS[name].default).strip().lower()
    if value not in ("error", "latest"):
        raise invalid_option(f"{name} = {values[name]!r} must be error or latest")
    return value


def _count(values: Mapping[str, str], name: str) -> int:
    """A positive number; 0: the option is absent, and has no default."""
    text = values.get(name, DEFAULTS[name].default)
    if not text and name not in values:
        return 0
    number = digits(text)
    if number is None or not 0 < number < 2**63:
        raise invalid_option(f"{name} = {text!r} is not a positive number")
    return number


def _tasks(values: Mapping[str, str]) -> TaskRules:
    enough = TaskSize(_count(values, "recordsPerTask"), _count(values, "bytesPerTask"))
    at_least, max_records = _count(values, "minPartitions"), _count(values, "maxRecordsPerPartition")
    return TaskRules(enough, at_least=at_least, max_records=max_records)


def _flag(values: Mapping[str, str], name: str) -> bool:
    text = values.get(name, DEFAULTS[name].default).strip().lower()
    if text not in ("true", "false"):
        raise invalid_option(f"{name} = {values[name]!r} is neither true nor false")
    return text == "true"


def _columns(values: Mapping[str, str]) -> tuple[str, ...] | None:
    text = values.get("columns")
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise invalid_option("columns names no column")
    return names


def _limits(values: Mapping[str, str]) -> Limits:
    delay = values.get("maxTriggerDelay", DEFAULTS["maxTriggerDelay"].default)
    return checked(
        Limits(
            max_offsets=_count(values, "maxOffsetsPerTrigger"),
            max_bytes=_count(values, "maxBytesPerTrigger"),
            min_offsets=_count(values, "minOffsetsPerTrigger"),
            max_delay_ms=parse_duration_ms("maxTriggerDelay", delay),
        )
    )


def _group(values: Mapping[str, str]) -> str:
    group = values.get("group", "").strip()
    if "group" in values and not group:
        raise invalid_option("group names no group")
    return group
