"""The settings that a log itself follows."""

from __future__ import annotations

from dataclasses import dataclass

from spark_broker.config import TopicConfig

AS_THE_TOPIC = -2
"""`local.retention.*`: the topic's own retention counts."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The topic's settings that its logs follow. For the two retention settings, -1 means no limit."""

    segment_bytes: int = 1_073_741_824
    segment_index_bytes: int = 1_048_576
    segment_ms: int = 604_800_000
    retention_ms: int = 604_800_000
    retention_bytes: int = -1
    flush_messages: int = 2**63 - 1
    deletes_last_segment: bool = True

    @classmethod
    def of_topic(cls, config: TopicConfig) -> LogConfig:
        """The log's part of a topic's settings. With `delta.path`, `local.retention.*` and `storage.format` count."""
        retention_ms, retention_bytes = config.retention_ms, config.retention_bytes
        if config.delta_path and config.local_retention_ms != AS_THE_TOPIC:
            retention_ms = config.local_retention_ms
        if config.delta_path and config.local_retention_bytes != AS_THE_TOPIC:
            retention_bytes = config.local_retention_bytes
        if config.delta_path and config.storage_format == "delta":
            retention_bytes = 0
        if "delete" not in config.cleanup_policy:
            retention_ms = retention_bytes = -1
        segment_ms = config.segment_ms
        if "compact" in config.cleanup_policy:
            segment_ms = min(segment_ms, config.max_compaction_lag_ms)
        return cls(
            segment_bytes=config.segment_bytes,
            segment_index_bytes=config.segment_index_bytes,
            segment_ms=segment_ms,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
            flush_messages=config.flush_messages,
            deletes_last_segment=not config.delta_path,
        )
