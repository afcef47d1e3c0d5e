"""Calls to the controller: each is one decision."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from spark_broker.config import ClusterSettings
from spark_broker.controller.describe import describe
from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.effects import Decision
from spark_broker.controller.history import confirm_history, report_tiering
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.isr import alter_partition
from spark_broker.controller.leader_balance import elect_leaders
from spark_broker.controller.log_ends import LogEnds
from spark_broker.controller.log_starts import raise_log_starts
from spark_broker.controller.producer_ids import allocate_producer_ids
from spark_broker.controller.reassignment import reassign
from spark_broker.controller.topic_schema import alter_topic_schema
from spark_broker.controller.topics import (
    NewTopicValues,
    alter_topic_config,
    create_partitions,
    create_topic,
    delete_topic,
    internal_topic_request,
)
from spark_broker.errors import InvalidRequestError, NotControllerError
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, TRANSACTION_STATE_TOPIC
from spark_broker.protocol.messages import (
    AllocateProducerIdsRequest,
    AlterPartitionRequest,
    AlterTopicConfigRequest,
    AlterTopicSchemaRequest,
    CallRequest,
    ConfirmHistoryRequest,
    CreatePartitionsRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    ElectLeadersRequest,
    EmptyResponse,
    EnsureOffsetsTopicRequest,
    EnsureTransactionsTopicRequest,
    MetadataRequest,
    RaiseLogStartsRequest,
    ReassignPartitionRequest,
    ReportTieringRequest,
)


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a call's decision needs beside the image.

    `expected_brokers`: how many are live or may soon be back. `disks`: what brokers say of theirs.
    """

    settings: ClusterSettings
    new_topic: NewTopicValues | None
    expected_brokers: int
    log_ends: LogEnds
    disks: Disks = ALL_WELL
    next_tiering_at_ms: Mapping[str, int] = field(default_factory=dict)
    """When the cluster tiers each topic next, by topic id."""
    now_ms: int = 0


def check_caller(image: MetadataImage, request: CallRequest, connected: Collection[int], *, let_in: bool) -> None:
    """Raises NotControllerError for what comes from a broker that this controller has not let in.

    The metadata may be an older copy. Then brokers are about to be refused that an earlier controller had let in. They
    still ask for producer ids, and still pass on what clients ask. `let_in`: whether any broker has registered with
    this controller, and the metadata does not look like an older copy; `connected`: those that have a session.
    """
    if isinstance(request, AllocateProducerIdsRequest | AlterPartitionRequest):
        if request.broker_id in image.brokers and request.broker_id not in connected:
            raise NotControllerError(f"broker {request.broker_id} has no session with this controller")
    elif image.brokers and not let_in:
        raise NotControllerError("no broker that has seen metadata before has registered with this controller yet")


def answer(image: MetadataImage, request: CallRequest, context: CallContext) -> Decision:
    """The decision on a call. Raises the typed error that goes to the caller."""
    match request:
        case AlterPartitionRequest():
            return alter_partition(image, request, context.disks)
        case AllocateProducerIdsRequest():
            return allocate_producer_ids(image, request)
        case MetadataRequest():
            next_ms = {id_: max(0, at_ms - context.now_ms) for id_, at_ms in context.next_tiering_at_ms.items()}
            return Decision((), describe(image, request.topics, next_tiering_ms=next_ms), certain=request.certain)
        case CreateTopicRequest():
            return create_topic(image, request, _values(context), context.settings, context.disks)
        case EnsureOffsetsTopicRequest():
            return _ensure_internal_topic(image, context, CONSUMER_OFFSETS_TOPIC)
        case EnsureTransactionsTopicRequest():
            return _ensure_internal_topic(image, context, TRANSACTION_STATE_TOPIC)
        case DeleteTopicRequest():
            return delete_topic(image, request)
        case CreatePartitionsRequest():
            return create_partitions(image, request, context.disks)
        case AlterTopicConfigRequest():
            return alter_topic_config(image, request, context.settings)
        case AlterTopicSchemaRequest():
            return alter_topic_schema(image, request)
        case ElectLeadersRequest():
            return elect_leaders(image, context.log_ends, request, context.disks)
        case ReassignPartitionRequest():
            return reassign(image, request, context.disks)
        case ConfirmHistoryRequest() | RaiseLogStartsRequest() | ReportTieringRequest():
            return _of_history(image, request)
        case _:
            raise InvalidRequestError(f"{type(request).__name__} goes to a broker, not to the controller")


def _of_history(
    image: MetadataImage, request: ConfirmHistoryRequest | RaiseLogStartsRequest | ReportTieringRequest
) -> Decision:
    match request:
        case ConfirmHistoryRequest():
            return confirm_history(image, request)
        case RaiseLogStartsRequest():
            return raise_log_starts(image, request)
        case ReportTieringRequest():
            return report_tiering(image, request)


def reason(request: CallRequest) -> str:
    """The reason that the log gives for the partitions that the call changes."""
    match request:
        case AlterPartitionRequest():
            return f"proposed by broker {request.broker_id}, which leads"
        case ElectLeadersRequest():
            return "an election was asked for"
        case ReassignPartitionRequest():
            return "a reassignment was asked for"
        case _:
            return "asked for"


def _values(context: CallContext) -> NewTopicValues:
    if context.new_topic is None:
        raise InvalidRequestError("the call may create a topic, but brought no id for it")
    return context.new_topic


def _ensure_internal_topic(image: MetadataImage, context: CallContext, name: str) -> Decision:
    request = internal_topic_request(image, context.settings, context.expected_brokers, name)
    if request is None:
        return Decision((), EmptyResponse())
    return create_topic(image, request, _values(context), context.settings, context.disks)
