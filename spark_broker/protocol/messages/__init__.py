"""Every message between processes.

Requests and responses are msgspec structs, sent as arrays with a tag; `wire.py` encodes them. Bounds are part of the
types, so that a hostile message fails in the decoder. `topic_id` is the 32 hex digits of a topic's UUID: a topic that
is deleted and created again gets a new one. `error_code` 0 means success; others are in `errors.py`.
"""

from __future__ import annotations

from spark_broker.protocol.messages.admin import (
    AlterTopicConfigRequest,
    AlterTopicSchemaRequest,
    AnnounceTieringRequest,
    ConfirmHistoryRequest,
    CreatePartitionsRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    ElectionResult,
    ElectLeadersRequest,
    ElectLeadersResponse,
    EnsureOffsetsTopicRequest,
    RaiseLogStartsRequest,
    ReassignPartitionRequest,
    ReportTieringRequest,
)
from spark_broker.protocol.messages.calls import (
    BrokerMetadata,
    CommittedOffset,
    ControllerMetadata,
    DeletedRecords,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DescribeLogDirRequest,
    DescribeLogDirResponse,
    EmptyResponse,
    HistoryMetadata,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ListedOffset,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    MetadataRequest,
    MetadataResponse,
    OffsetCommitRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
    PartitionMetadata,
    ReplicaSetAside,
    StoredReplica,
    TopicMetadata,
)
from spark_broker.protocol.messages.common import (
    ACKS_ALL,
    PROTOCOL_VERSION,
    ErrorResponse,
    Message,
)
from spark_broker.protocol.messages.control import (
    ANY_INCARNATION,
    NO_INCARNATION,
    UNRECORDED,
    AllocateProducerIdsRequest,
    AllocateProducerIdsResponse,
    AlterIsr,
    AlterIsrResult,
    AlterPartitionRequest,
    AlterPartitionResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    IsrMember,
    LogEnd,
    MetadataSeen,
    MetadataUpdate,
    ProducerStateEntry,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    ReplicaStateRequest,
    ReplicaStateResponse,
    StopBroker,
    TopicSchema,
)
from spark_broker.protocol.messages.groups import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    DeleteGroupOffsetsRequest,
    DeleteGroupRequest,
    DescribeGroupRequest,
    DescribeGroupResponse,
    GroupListing,
    GroupMember,
    GroupRebalance,
    ListGroupsRequest,
    ListGroupsResponse,
    MemberAbout,
    TopicPartitions,
)
from spark_broker.protocol.messages.streams import (
    AppendRequest,
    AppendResponse,
    FetchedPartition,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FileExtent,
    ReplicaFetched,
    ReplicaFetchRequest,
    ReplicaFetchResponse,
    ReplicaPartition,
)
from spark_broker.protocol.messages.transactions import (
    AbortTransactionRequest,
    AddPartitionToTransactionRequest,
    AddPartitionToTransactionResponse,
    CommitTransactionRequest,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    EndTransactionRequest,
    EnsureTransactionsTopicRequest,
    InitTransactionsRequest,
    JoinTransactionRequest,
    MarkerResult,
    TransactionalOffsetCommitRequest,
    TransactionDescription,
    TransactionMarker,
    WriteTransactionMarkersRequest,
    WriteTransactionMarkersResponse,
)

CallRequest = (
    MetadataRequest
    | ListOffsetsRequest
    | DeleteRecordsRequest
    | DescribeLogDirRequest
    | InitProducerIdRequest
    | OffsetCommitRequest
    | OffsetFetchRequest
    | CreateTopicRequest
    | DeleteTopicRequest
    | CreatePartitionsRequest
    | AlterTopicConfigRequest
    | AlterTopicSchemaRequest
    | ElectLeadersRequest
    | ReassignPartitionRequest
    | ConfirmHistoryRequest
    | RaiseLogStartsRequest
    | ReportTieringRequest
    | AnnounceTieringRequest
    | EnsureOffsetsTopicRequest
    | AlterPartitionRequest
    | AllocateProducerIdsRequest
    | ReplicaStateRequest
    | EnsureTransactionsTopicRequest
    | InitTransactionsRequest
    | AddPartitionToTransactionRequest
    | EndTransactionRequest
    | JoinTransactionRequest
    | CommitTransactionRequest
    | AbortTransactionRequest
    | WriteTransactionMarkersRequest
    | TransactionalOffsetCommitRequest
    | DescribeTransactionsRequest
    | ConsumerGroupHeartbeatRequest
    | ListGroupsRequest
    | DescribeGroupRequest
    | DeleteGroupRequest
    | DeleteGroupOffsetsRequest
)
CallResponse = (
    ErrorResponse
    | MetadataResponse
    | ListOffsetsResponse
    | DeleteRecordsResponse
    | DescribeLogDirResponse
    | InitProducerIdResponse
    | OffsetFetchResponse
    | EmptyResponse
    | AlterPartitionResponse
    | ElectLeadersResponse
    | AllocateProducerIdsResponse
    | ReplicaStateResponse
    | WriteTransactionMarkersResponse
    | AddPartitionToTransactionResponse
    | DescribeTransactionsResponse
    | ConsumerGroupHeartbeatResponse
    | ListGroupsResponse
    | DescribeGroupResponse
)
StreamMessage = (
    AppendRequest
    | AppendResponse
    | FetchRequest
    | FetchResponse
    | ReplicaFetchRequest
    | ReplicaFetchResponse
    | RegisterBrokerRequest
    | RegisterBrokerResponse
    | HeartbeatRequest
    | HeartbeatResponse
    | MetadataUpdate
    | StopBroker
    | ErrorResponse
)

__all__ = [
    "ConsumerGroupHeartbeatRequest",
    "ConsumerGroupHeartbeatResponse",
    "DeleteGroupOffsetsRequest",
    "DeleteGroupRequest",
    "DescribeGroupRequest",
    "DescribeGroupResponse",
    "GroupListing",
    "GroupMember",
    "GroupRebalance",
    "ListGroupsRequest",
    "ListGroupsResponse",
    "MemberAbout",
    "TopicPartitions",
    "AnnounceTieringRequest",
    "ANY_INCARNATION",
    "NO_INCARNATION",
    "UNRECORDED",
    "ACKS_ALL",
    "AbortTransactionRequest",
    "AddPartitionToTransactionRequest",
    "AllocateProducerIdsRequest",
    "AlterIsr",
    "AlterIsrResult",
    "AlterPartitionRequest",
    "AlterPartitionResponse",
    "AlterTopicConfigRequest",
    "AlterTopicSchemaRequest",
    "AppendRequest",
    "AppendResponse",
    "BrokerMetadata",
    "CallRequest",
    "CallResponse",
    "ControllerMetadata",
    "ConfirmHistoryRequest",
    "CommitTransactionRequest",
    "CommittedOffset",
    "OffsetFetchResponse",
    "CreatePartitionsRequest",
    "CreateTopicRequest",
    "DeletedRecords",
    "DeleteRecordsPartition",
    "DeleteRecordsRequest",
    "DeleteRecordsResponse",
    "DescribeLogDirRequest",
    "DescribeLogDirResponse",
    "DeleteTopicRequest",
    "DescribeTransactionsRequest",
    "ElectLeadersRequest",
    "ElectionResult",
    "ElectLeadersResponse",
    "EmptyResponse",
    "EndTransactionRequest",
    "EnsureOffsetsTopicRequest",
    "EnsureTransactionsTopicRequest",
    "ErrorResponse",
    "FetchPartition",
    "FetchRequest",
    "FetchResponse",
    "FileExtent",
    "FetchedPartition",
    "HistoryMetadata",
    "MetadataRequest",
    "HeartbeatRequest",
    "HeartbeatResponse",
    "InitProducerIdRequest",
    "InitTransactionsRequest",
    "IsrMember",
    "JoinTransactionRequest",
    "ListOffsetsRequest",
    "LogEnd",
    "MarkerResult",
    "WriteTransactionMarkersResponse",
    "Message",
    "MetadataResponse",
    "MetadataSeen",
    "MetadataUpdate",
    "OffsetCommitRequest",
    "OffsetFetchRequest",
    "ListedOffset",
    "ListOffsetsPartition",
    "ListOffsetsResponse",
    "PROTOCOL_VERSION",
    "AddPartitionToTransactionResponse",
    "PartitionMetadata",
    "AllocateProducerIdsResponse",
    "InitProducerIdResponse",
    "ProducerStateEntry",
    "RaiseLogStartsRequest",
    "ReassignPartitionRequest",
    "ReportTieringRequest",
    "RegisterBrokerRequest",
    "RegisterBrokerResponse",
    "ReplicaFetchRequest",
    "ReplicaFetchResponse",
    "ReplicaFetched",
    "ReplicaPartition",
    "ReplicaStateRequest",
    "ReplicaSetAside",
    "ReplicaStateResponse",
    "StopBroker",
    "StoredReplica",
    "StreamMessage",
    "TopicMetadata",
    "TopicSchema",
    "TransactionDescription",
    "DescribeTransactionsResponse",
    "TransactionMarker",
    "TransactionalOffsetCommitRequest",
    "WriteTransactionMarkersRequest",
]
