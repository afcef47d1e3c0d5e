"""Settings of topics, validated by `config.TopicConfig`.

Only what differs from the built-in defaults is stored, and `retention.*` where somebody has set it: rows of a topic's
table are deleted only then.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from spark_broker.config import TopicConfig
from spark_broker.controller.image import TopicState
from spark_broker.errors import InvalidConfigError
from spark_broker.model import FILE_NAME_BYTES_MAX, dead_letters_path

TABLE_NAME_BYTES_MAX = FILE_NAME_BYTES_MAX - len(dead_letters_path(""))

_BUILT_IN = TopicConfig().to_dict()

_URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]+:/+[^/]", re.IGNORECASE)
"""Of a store that is no local directory."""

_OTHERWISE = "%#?\\"
"""In a URL they have a meaning, and Hadoop's paths have none of it."""

_KEPT = frozenset({"retention.ms", "retention.bytes"})
"""Settings that are stored even if they say what the default says."""


OF_ROWS = frozenset(
    {
        "key.columns",
        "timestamp.column",
        "storage.format",
        "delta.path",
        "delta.commit.interval.ms",
        "delta.type.widening",
        "local.retention.ms",
        "local.retention.bytes",
    }
)
"""Settings about columns and tables. Internal topics have none."""


def without_rows(defaults: TopicConfig) -> TopicConfig:
    """The same, but for `OF_ROWS`."""
    return defaults.with_values({name: _BUILT_IN[name] for name in OF_ROWS})


def stored_config(defaults: TopicConfig, values: Mapping[str, str]) -> dict[str, str]:
    """What to store for a topic: the cluster's `[topic]` defaults with these values over them.

    `TopicConfig.parse` of the result gives every setting. Raises InvalidConfigError, which names the nearest setting.
    """
    config = defaults.with_values(values)
    _check_table_path(config.delta_path)
    return _stored(config, _KEPT & config.given().keys())


def _check_table_path(path: str) -> None:
    """Only of a path that is given now: a topic from before this check can still be altered."""
    if not path:
        return
    local = _without_scheme(path)
    if not _URL.match(path) and not local.startswith("/"):
        raise InvalidConfigError(
            f"delta.path: {path!r} is neither a URL nor an absolute path: each process would look in another directory"
        )
    refused = next((each for each in path if each in _OTHERWISE or not each.isprintable()), None)
    if refused is not None or path != path.strip():
        why = f"{refused!r} in it" if refused is not None else "the space at its end"
        raise InvalidConfigError(
            f"delta.path: Spark and deltalake would read {path!r} as different directories, because of {why}"
        )
    size = len(path.rstrip("/").rpartition("/")[2].encode())
    if size > TABLE_NAME_BYTES_MAX:
        raise InvalidConfigError(
            f"delta.path: the table's name has {size} bytes, and may have {TABLE_NAME_BYTES_MAX}: "
            "the table of the records that it refuses, which is beside it, has a longer name"
        )


def _without_scheme(path: str) -> str:
    """A local directory may be a path, or a URL in one of two forms."""
    return path.removeprefix("file://").removeprefix("file:")


def tables_of(config: Mapping[str, str]) -> frozenset[str]:
    """Where a topic with these settings has its table, and the table of the records that this one refuses."""
    path = _without_scheme(config.get("delta.path", "")).rstrip("/")
    return frozenset((path, dead_letters_path(path)) if path else ())


def _stored(config: TopicConfig, explicit: Collection[str]) -> dict[str, str]:
    if config.storage_format == "delta" and not config.delta_path:
        raise InvalidConfigError("storage.format=delta needs delta.path, the URL of a Delta table")
    if config.storage_format == "delta" and "compact" in config.cleanup_policy:
        raise InvalidConfigError(
            "storage.format=delta leaves brokers nothing to compact: cleanup.policy must be delete"
        )
    return {name: value for name, value in config.to_dict().items() if value != _BUILT_IN[name] or name in explicit}


def altered_config(
    defaults: TopicConfig, current: Mapping[str, str], values: Mapping[str, str | None]
) -> dict[str, str]:
    """`current` (as stored) with settings set, or reset to the default (None). Raises InvalidConfigError."""
    cluster = defaults.to_dict()
    changed = {name: cluster.get(name, "") if value is None else value for name, value in values.items()}
    _check_table_path(changed.get("delta.path", ""))
    named = {name for name, value in values.items() if value is not None or name in defaults.given()}
    explicit = {name for name in _KEPT if name in (named if name in values else current)}
    return _stored(TopicConfig.parse(current).with_values(changed), explicit)


def min_insync_replicas(topic: TopicState) -> int:
    """The topic's min.insync.replicas. (Parsing every setting would cost too much where thousands of ISRs shrink.)"""
    return int(topic.config.get("min.insync.replicas", _BUILT_IN["min.insync.replicas"]))


def allows_unclean_election(topic: TopicState) -> bool:
    """The topic's unclean.leader.election.enable."""
    return topic.config.get("unclean.leader.election.enable", "false") == "true"
