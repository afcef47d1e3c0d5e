"""What happens to the controller. The shell turns messages, timers and commands into these, in one queue."""

from __future__ import annotations

from dataclasses import dataclass

from spark_broker.controller.topics import NewTopicValues
from spark_broker.protocol.messages import CallRequest, HeartbeatRequest, RegisterBrokerRequest


@dataclass(frozen=True, slots=True)
class ControllerStarted:
    """The controller replayed the log and takes over as `writer`; `cluster_id` is for a log that has none yet.

    `host`, `pid`: of its driver; `started_ms`: now, by the driver's clock (UTC). `accept_older_metadata`: an operator
    says that the log may lack what brokers have seen.
    """

    writer: str
    cluster_id: str
    host: str = ""
    pid: int = -1
    started_ms: int = 0
    accept_older_metadata: bool = False


@dataclass(frozen=True, slots=True)
class BrokerRegisters:
    """`wall_ms`: the controller's wall clock (UTC) when the registration was read; -1: not known."""

    session_id: int
    request: RegisterBrokerRequest
    wall_ms: int = -1


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    """`received_ms`: when the stream's thread read it, which may be earlier than when it is handled.

    `wall_ms`: the same moment by the controller's wall clock (UTC), which may be set at any time; -1: not known.
    """

    session_id: int
    heartbeat: HeartbeatRequest
    received_ms: int
    wall_ms: int = -1


@dataclass(frozen=True, slots=True)
class SessionEnded:
    session_id: int


@dataclass(frozen=True, slots=True)
class PortProbed:
    broker_id: int
    session_id: int
    refused: bool


@dataclass(frozen=True, slots=True)
class SparkLost:
    """Spark reported the executor or task of this launch as lost."""

    launch: int


@dataclass(frozen=True, slots=True)
class CallReceived:
    """A call. `new_topic` comes with calls that may create a topic."""

    call_id: int
    request: CallRequest
    new_topic: NewTopicValues | None = None


@dataclass(frozen=True, slots=True)
class LaunchRequested:
    call_id: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Stop the broker of this launch, or all of them (None) because the cluster stops."""

    call_id: int
    launch: int | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    ControllerStarted
    | BrokerRegisters
    | HeartbeatReceived
    | SessionEnded
    | PortProbed
    | SparkLost
    | CallReceived
    | LaunchRequested
    | StopRequested
    | Tick
)
