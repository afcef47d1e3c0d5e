"""What the controller asks its shell to do, after the records of the same outcome are in the metadata log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_broker.controller.partition_line import PartitionChanged
from spark_broker.controller.records import MetadataRecord
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.messages import Message


@dataclass(frozen=True, slots=True)
class LaunchNumber:
    """The answer to a request for a launch number."""

    launch: int


@dataclass(frozen=True, slots=True)
class StoppedBrokers:
    """The answer to a request to stop brokers: all of these have left."""

    broker_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a call. An exception that is no SparkBrokerError is a bug that ends this call alone."""

    call_id: int
    result: Message | LaunchNumber | StoppedBrokers | Exception


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a broker on its session's stream."""

    session_id: int
    message: Message


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Send the whole image on this session's stream, and every later change of it."""

    session_id: int


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End the stream with this error; what still comes on it is void."""

    session_id: int
    error: SparkBrokerError


@dataclass(frozen=True, slots=True)
class ProbePort:
    """Connect to the broker's port and report whether the connection was refused."""

    broker_id: int
    session_id: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class FenceBrokers:
    """These brokers are no longer live: one decision for all of them."""

    broker_ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth a line in the controller's log. `expected`: it belongs to ordinary operation.

    `fields`: broker, epoch and the like, by name, for programs that read the log.
    """

    text: str
    expected: bool = False
    fields: Mapping[str, object] = field(default_factory=dict, compare=False)


Effect = Reply | Send | Subscribe | CloseSession | ProbePort | Note | PartitionChanged
SessionEffect = FenceBrokers | Send | CloseSession | ProbePort | Note


@dataclass(frozen=True, slots=True)
class ControllerResult:
    """What an event led to. The effects are carried out only once the records are committed.

    `certain`: as in `Decision`.
    """

    records: tuple[MetadataRecord, ...] = ()
    effects: tuple[Effect, ...] = ()
    certain: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """Records, and the response to the caller.

    `certain`: the caller relies on it that no other controller has decided anything since. With records, that is always
    so: a controller that was replaced cannot write.
    """

    records: tuple[MetadataRecord, ...]
    response: Message
    certain: bool = False
