"""Small files that are replaced whole: a CRC, then JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from spark_broker.errors import DamagedLogError
from spark_broker.model import TopicPartition
from spark_broker.protocol.crc32c import crc32c
from spark_broker.storage.files import write_atomically

LEADER_EPOCHS_FILE = "leader-epochs.json"
LOG_STATE_FILE = "log-state.json"
HIGH_WATERMARKS_FILE = "high-watermarks.json"


@dataclass(frozen=True, slots=True)
class LogState:
    """What a log cannot read from its segments. Everything below `recovery_point` is synced (a lower value is safe)."""

    log_start_offset: int = 0
    recovery_point: int = 0


def write_checkpoint(path: Path, value: object) -> None:
    """Replace the checkpoint, durably. Raises OSError."""
    text = json.dumps(value, separators=(",", ":")).encode()
    write_atomically(path, b"%08x\n%s\n" % (crc32c(text), text))


def read_checkpoint(path: Path) -> object | None:
    """The value; None when there is no such file. Raises DamagedLogError when its CRC is wrong."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    crc, _, text = data.removesuffix(b"\n").partition(b"\n")
    if crc != b"%08x" % crc32c(text):
        raise DamagedLogError(f"{path.name} fails its CRC")
    value: object = json.loads(text)
    return value


def read_leader_epochs(directory: Path) -> list[tuple[int, int]]:
    """(leader epoch, start offset) pairs of a partition, in order; empty when none were written."""
    value = read_checkpoint(directory / LEADER_EPOCHS_FILE)
    if value is None:
        return []
    if not isinstance(value, list):
        raise DamagedLogError(f"{LEADER_EPOCHS_FILE} does not hold a list")
    return [(int(epoch), int(offset)) for epoch, offset in value]


def write_leader_epochs(directory: Path, epochs: Sequence[tuple[int, int]]) -> None:
    """Save the leader-epoch history of a partition. Raises OSError."""
    write_checkpoint(directory / LEADER_EPOCHS_FILE, [list(entry) for entry in epochs])


def read_high_watermarks(log_directory: Path) -> dict[TopicPartition, int]:
    """The high watermarks of all partitions of a log directory, as last saved."""
    value = read_checkpoint(log_directory / HIGH_WATERMARKS_FILE)
    if value is None:
        return {}
    if not isinstance(value, list):
        raise DamagedLogError(f"{HIGH_WATERMARKS_FILE} does not hold a list")
    return {TopicPartition(str(topic), int(partition)): int(offset) for topic, partition, offset in value}


def write_high_watermarks(log_directory: Path, high_watermarks: Mapping[TopicPartition, int]) -> None:
    """Save the high watermarks of all partitions. Raises OSError."""
    value = [[tp.topic, tp.partition, offset] for tp, offset in sorted(high_watermarks.items())]
    write_checkpoint(log_directory / HIGH_WATERMARKS_FILE, value)


def read_log_state(directory: Path) -> LogState:
    """The state of a partition's log; all zero when none was written."""
    value = read_checkpoint(directory / LOG_STATE_FILE)
    if value is None:
        return LogState()
    if not isinstance(value, dict):
        raise DamagedLogError(f"{LOG_STATE_FILE} does not hold an object")
    return LogState(int(value["log_start_offset"]), int(value["recovery_point"]))


def write_log_state(directory: Path, state: LogState) -> None:
    """Save the state of a partition's log. Raises OSError."""
    write_checkpoint(directory / LOG_STATE_FILE, asdict(state))
