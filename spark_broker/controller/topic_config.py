"""Settings of topics, validated by `config.TopicConfig`. Only what differs from the built-in defaults is stored."""

from __future__ import annotations

from collections.abc import Mapping

from spark_broker.config import TopicConfig
from spark_broker.controller.image import TopicState

_BUILT_IN = TopicConfig().to_dict()


def stored_config(defaults: TopicConfig, values: Mapping[str, str]) -> dict[str, str]:
    """What to store for a topic: the cluster's `[topic]` defaults with these values over them.

    `TopicConfig.parse` of the result gives every setting. Raises InvalidConfigError, which names the nearest setting.
    """
    effective = defaults.with_values(values).to_dict()
    return {name: value for name, value in effective.items() if value != _BUILT_IN[name]}


def altered_config(
    defaults: TopicConfig, current: Mapping[str, str], values: Mapping[str, str | None]
) -> dict[str, str]:
    """`current` (as stored) with settings set, or reset to the cluster's default (None). Raises InvalidConfigError."""
    cluster = defaults.to_dict()
    changed = {name: cluster.get(name, "") if value is None else value for name, value in values.items()}
    return stored_config(TopicConfig.parse(current), changed)


def min_insync_replicas(topic: TopicState) -> int:
    """The topic's min.insync.replicas. (Parsing every setting would cost too much where thousands of ISRs shrink.)"""
    return int(topic.config.get("min.insync.replicas", _BUILT_IN["min.insync.replicas"]))


def allows_unclean_election(topic: TopicState) -> bool:
    """The topic's unclean.leader.election.enable."""
    return topic.config.get("unclean.leader.election.enable", "false") == "true"
