"""The messages between the driver and its controller's process: one line of JSON each, over stdin and stdout.

The controller's log lines come this way, too. They become part of the driver's log.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from spark_broker.errors import InvalidRequestError, SparkBrokerError, error_from_code
from spark_broker.protocol.wire import UNDECODABLE

MAX_LINE_BYTES = 64 * 1024 * 1024

T = TypeVar("T")


class ControllerConfig(Struct, frozen=True, kw_only=True):
    """What a controller is started with: the first line on its stdin.

    `cluster` and `topic` are settings by dotted name. `metadata_dir` is an absolute path or fsspec URL. `host` is bound
    and given to brokers; `port` 0: any free one. `known_cluster_ids`: what the log directories carry.
    `shared_executor`: brokers may share one executor (plain `local[N]`). `run`: a uuid of this run of the cluster, the
    same when its controller is started again. `take_over`: take the directory from another run, even if that is alive.
    `accept_older_metadata`: see `controller.lineage`. `log_dirs`: the absolute directory of the brokers' directories.
    Empty: each broker may have its own.
    """

    cluster: dict[str, str]
    topic: dict[str, str]
    metadata_dir: str
    host: str = "127.0.0.1"
    port: int = 0
    known_cluster_ids: list[str] = []
    shared_executor: bool = False
    log_level: str = "INFO"
    run: str = ""
    take_over: bool = False
    accept_older_metadata: bool = False
    log_dirs: str = ""


class Started(Struct, frozen=True, kw_only=True, tag=True):
    """The first line of the controller's answer: it serves, or why it does not (`error_code` other than 0)."""

    port: int = -1
    cluster_id: str = ""
    controller_epoch: int = -1
    error_code: int = 0
    error_message: str = ""


class Command(Struct, frozen=True, kw_only=True):
    """cmd: new_launch, spark_loss (launch), stop_brokers, stop_broker (launch) or status."""

    id: int
    cmd: str
    launch: int = -1


class BrokerStatus(Struct, frozen=True, kw_only=True):
    """A registered broker. `fenced`: it is not live, perhaps for a long time."""

    id: int
    epoch: int
    launch: int
    host: str
    port: int
    rack: str | None
    machine: str
    executor_id: str
    executor_pid: int
    pid: int
    fenced: bool
    in_controlled_shutdown: bool


class ControllerStatus(Struct, frozen=True, kw_only=True):
    """The committed state, in short."""

    cluster_id: str
    controller_epoch: int
    brokers: list[BrokerStatus]
    topics: int
    leaderless_partitions: int


class Answer(Struct, frozen=True, kw_only=True, tag=True):
    """The answer to the command with this id."""

    id: int
    error_code: int = 0
    error_message: str = ""
    launch: int = -1
    broker_ids: list[int] = []
    status: ControllerStatus | None = None


class LogLine(Struct, frozen=True, tag=True):
    """A line of the controller's log, and the traceback that follows. `level`: a number of `logging`. `fields`: see
    `broker.log_format`.
    """

    level: int
    text: str
    fields: dict[str, Any] = {}
    traceback: str = ""


class ControllerFailed(Struct, frozen=True, tag=True):
    """The controller cannot go on, and why; its process ends next."""

    error_code: int
    error_message: str


FromController = Started | Answer | LogLine | ControllerFailed


def to_line(message: Struct) -> bytes:
    """The message as a line."""
    return msgspec.json.encode(message, enc_hook=str) + b"\n"


def from_line(line: bytes, kind: type[T]) -> T:
    """The message of a line to the controller. Raises InvalidRequestError."""
    try:
        return msgspec.json.decode(line, type=kind)
    except UNDECODABLE as error:
        raise InvalidRequestError(f"a line that is no {kind.__name__}: {error}") from None


_from_controller: msgspec.json.Decoder[FromController] = msgspec.json.Decoder(FromController)


def from_controller(line: bytes) -> FromController:
    """The message of a line from the controller. Raises InvalidRequestError."""
    try:
        return _from_controller.decode(line)
    except UNDECODABLE as error:
        raise InvalidRequestError(f"a line that no controller writes: {error}") from None


def error_of(message: Started | Answer | ControllerFailed) -> SparkBrokerError | None:
    """The error that the message carries."""
    return error_from_code(message.error_code, message.error_message) if message.error_code else None
