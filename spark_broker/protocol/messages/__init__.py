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
    ElectionResult,
    ElectionResults,
    ElectLeaders,
    EnsureOffsetsTopic,
    ReassignPartition,
)
from spark_broker.protocol.messages.calls import (
    BrokerMetadata,
    CommittedOffset,
    CommittedOffsets,
    ControllerMetadata,
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
    LogEnd,
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
from spark_broker.protocol.messages.transactions import (
    AbortTransaction,
    AddedToTransaction,
    AddPartitionToTransaction,
    CommitTransaction,
    DescribeTransactions,
    EndTransaction,
    EnsureTransactionsTopic,
    InitTransactions,
    JoinTransaction,
    MarkerResult,
    MarkersWritten,
    TransactionalOffsetCommit,
    TransactionDescription,
    TransactionDescriptions,
    TransactionMarker,
    WriteTransactionMarkers,
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
    | EnsureTransactionsTopic
    | InitTransactions
    | AddPartitionToTransaction
    | EndTransaction
    | JoinTransaction
    | CommitTransaction
    | AbortTransaction
    | WriteTransactionMarkers
    | TransactionalOffsetCommit
    | DescribeTransactions
)
CallResponse = (
    ErrorResponse
    | Metadata
    | Offsets
    | ProducerIdentity
    | CommittedOffsets
    | Empty
    | AlterPartitionResult
    | ElectionResults
    | ProducerIdBlock
    | ReplicaStateAnswer
    | MarkersWritten
    | AddedToTransaction
    | TransactionDescriptions
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
    "AbortTransaction",
    "AddPartitionToTransaction",
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
    "ControllerMetadata",
    "CommitTransaction",
    "CommittedOffset",
    "CommittedOffsets",
    "CreatePartitions",
    "CreateTopic",
    "DeleteTopic",
    "DescribeTransactions",
    "EARLIEST_TIMESTAMP_MS",
    "ElectLeaders",
    "ElectionResult",
    "ElectionResults",
    "Empty",
    "EndTransaction",
    "EnsureOffsetsTopic",
    "EnsureTransactionsTopic",
    "ErrorResponse",
    "FetchPartition",
    "FetchRequest",
    "FetchResponse",
    "FetchedPartition",
    "GetMetadata",
    "Heartbeat",
    "HeartbeatAnswer",
    "InitProducerId",
    "InitTransactions",
    "IsrMember",
    "JoinTransaction",
    "LATEST_TIMESTAMP_MS",
    "ListOffsets",
    "LogEnd",
    "MarkerResult",
    "MarkersWritten",
    "Message",
    "Metadata",
    "MetadataUpdate",
    "OffsetCommit",
    "OffsetFetch",
    "OffsetInfo",
    "OffsetSpec",
    "Offsets",
    "PROTOCOL_VERSION",
    "AddedToTransaction",
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
    "TransactionDescription",
    "TransactionDescriptions",
    "TransactionMarker",
    "TransactionalOffsetCommit",
    "WriteTransactionMarkers",
]
