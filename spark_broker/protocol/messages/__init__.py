"""Every message between processes.

Requests and responses are msgspec structs, sent as arrays with a tag; `wire.py` encodes them. Bounds are part of the
types, so that a hostile message fails in the decoder. `topic_id` is the 32 hex digits of a topic's UUID: a topic that
was deleted and created again is another one. `error_code` 0 means success; others are in `errors.py`.
"""

from __future__ import annotations

from spark_broker.protocol.messages.admin import (
    AlterTopicConfig,
    CreatePartitions,
    CreateTopic,
    DeleteTopic,
    ElectLeaders,
    EnsureOffsetsTopic,
    ReassignPartition,
)
from spark_broker.protocol.messages.calls import (
    BrokerMetadata,
    CommittedOffset,
    CommittedOffsets,
    Empty,
    GetMetadata,
    InitProducerId,
    ListOffsets,
    Metadata,
    OffsetCommit,
    OffsetFetch,
    OffsetInfo,
    Offsets,
    OffsetSpec,
    PartitionMetadata,
    ProducerIdentity,
    TopicMetadata,
)
from spark_broker.protocol.messages.common import (
    ACKS_ALL,
    CALL_ACTION,
    EARLIEST_TIMESTAMP_MS,
    LATEST_TIMESTAMP_MS,
    PROTOCOL_VERSION,
    ErrorResponse,
    Message,
)
from spark_broker.protocol.messages.control import (
    AllocateProducerIds,
    AlterIsr,
    AlterIsrResult,
    AlterPartition,
    AlterPartitionResult,
    Heartbeat,
    HeartbeatAnswer,
    IsrMember,
    MetadataUpdate,
    ProducerIdBlock,
    ProducerStateEntry,
    RegisterBroker,
    Registered,
    ReplicaState,
    ReplicaStateAnswer,
    StopBroker,
)
from spark_broker.protocol.messages.streams import (
    AppendRequest,
    AppendResponse,
    FetchedPartition,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    ReplicaFetched,
    ReplicaFetchRequest,
    ReplicaFetchResponse,
    ReplicaPartition,
)

CallRequest = (
    GetMetadata
    | ListOffsets
    | InitProducerId
    | OffsetCommit
    | OffsetFetch
    | CreateTopic
    | DeleteTopic
    | CreatePartitions
    | AlterTopicConfig
    | ElectLeaders
    | ReassignPartition
    | EnsureOffsetsTopic
    | AlterPartition
    | AllocateProducerIds
    | ReplicaState
)
CallResponse = (
    ErrorResponse
    | Metadata
    | Offsets
    | ProducerIdentity
    | CommittedOffsets
    | Empty
    | AlterPartitionResult
    | ProducerIdBlock
    | ReplicaStateAnswer
)
StreamMessage = (
    AppendRequest
    | AppendResponse
    | FetchRequest
    | FetchResponse
    | ReplicaFetchRequest
    | ReplicaFetchResponse
    | RegisterBroker
    | Registered
    | Heartbeat
    | HeartbeatAnswer
    | MetadataUpdate
    | StopBroker
    | ErrorResponse
)

__all__ = [
    "ACKS_ALL",
    "AllocateProducerIds",
    "AlterIsr",
    "AlterIsrResult",
    "AlterPartition",
    "AlterPartitionResult",
    "AlterTopicConfig",
    "AppendRequest",
    "AppendResponse",
    "BrokerMetadata",
    "CALL_ACTION",
    "CallRequest",
    "CallResponse",
    "CommittedOffset",
    "CommittedOffsets",
    "CreatePartitions",
    "CreateTopic",
    "DeleteTopic",
    "EARLIEST_TIMESTAMP_MS",
    "ElectLeaders",
    "Empty",
    "EnsureOffsetsTopic",
    "ErrorResponse",
    "FetchPartition",
    "FetchRequest",
    "FetchResponse",
    "FetchedPartition",
    "GetMetadata",
    "Heartbeat",
    "HeartbeatAnswer",
    "InitProducerId",
    "IsrMember",
    "LATEST_TIMESTAMP_MS",
    "ListOffsets",
    "Message",
    "Metadata",
    "MetadataUpdate",
    "OffsetCommit",
    "OffsetFetch",
    "OffsetInfo",
    "OffsetSpec",
    "Offsets",
    "PROTOCOL_VERSION",
    "PartitionMetadata",
    "ProducerIdBlock",
    "ProducerIdentity",
    "ProducerStateEntry",
    "ReassignPartition",
    "RegisterBroker",
    "Registered",
    "ReplicaFetchRequest",
    "ReplicaFetchResponse",
    "ReplicaFetched",
    "ReplicaPartition",
    "ReplicaState",
    "ReplicaStateAnswer",
    "StopBroker",
    "StreamMessage",
    "TopicMetadata",
]
