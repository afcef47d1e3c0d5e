"""Every error of spark-broker, in one table.

An error has Kafka's error code where Kafka has the error; codes from 1,000 are ours. It says whether the same request
may succeed later (`retriable`) and whether the client should fetch metadata first (`refresh_metadata`). Its `hint` says
what the user does next. A type's hint fits every place that raises it; a place that knows more gives its own hint.
Errors cross the wire as `(code, message)` and are raised again, as the same type, at the client that sent the request.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import ClassVar, NoReturn, TypeVar

from spark_broker.pages import page

AnyError = TypeVar("AnyError", bound=Exception)


class SparkBrokerError(Exception):
    """Base of every error that spark-broker raises on purpose."""

    code: ClassVar[int] = -1
    retriable: ClassVar[bool] = False
    refresh_metadata: ClassVar[bool] = False
    hint: str = "This is a bug of spark-broker: please report it with the broker's log."

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        """`hint`: what to do next in this case; it replaces the hint of the type."""
        super().__init__(message)
        self.message = message
        if hint:
            self.hint = hint

    @property
    def name(self) -> str:
        """The error's name in the table, as in Kafka: `NOT_LEADER_OR_FOLLOWER`."""
        return _constant_name(type(self).__name__)

    def __str__(self) -> str:
        text = self.message or (type(self).__doc__ or "").strip().split("\n")[0]
        return f"[{self.name}] {text} -> {self.hint}"


def _constant_name(class_name: str) -> str:
    stem = class_name.removesuffix("Error")
    return "".join("_" + c if c.isupper() and i else c for i, c in enumerate(stem)).upper()


class UnknownServerError(SparkBrokerError):
    """The broker met an unexpected error while it served the request."""

    code = -1


class OffsetOutOfRangeError(SparkBrokerError):
    """The requested offset is not within the partition's log."""

    code = 1
    hint = "Seek to an offset from log_start_offset to high_watermark, or set auto.offset.reset."


class CorruptMessageError(SparkBrokerError):
    """A batch failed its checksum or is not a valid Arrow message; nothing of it was stored."""

    code = 2
    hint = "Send the batch again; if it repeats, the producer or the network alters bytes."


class UnknownTopicOrPartitionError(SparkBrokerError):
    """The topic or partition does not exist, or this broker does not host it."""

    code = 3
    retriable = True
    refresh_metadata = True
    hint = "Compare with `spark-broker topics list` and `topics describe NAME`, or create the topic."


class LeaderNotAvailableError(SparkBrokerError):
    """The partition has no leader: no replica is alive that is known to be complete."""

    code = 5
    retriable = True
    refresh_metadata = True
    hint = f"Wait for a broker of the ISR or ELR (`spark-broker topics describe`); what else helps: {page('leaders')}."


class NotLeaderOrFollowerError(SparkBrokerError):
    """The broker no longer leads the partition."""

    code = 6
    retriable = True
    refresh_metadata = True
    hint = "Refresh metadata and send to the new leader; the clients do so by themselves."


class RequestTimedOutError(SparkBrokerError):
    """The request was not answered within its deadline; an append may or may not have been stored."""

    code = 7
    retriable = True
    refresh_metadata = True
    hint = "Send it again (an idempotent producer stores nothing twice), or raise the time-out."


class MessageTooLargeError(SparkBrokerError):
    """The batch is larger than the topic's max.message.bytes; nothing was stored."""

    code = 10
    hint = "Append smaller batches, or raise max.message.bytes of the topic."


class StaleControllerEpochError(SparkBrokerError):
    """A controller with a higher epoch has taken over."""

    code = 11
    hint = "Stop the older driver; only one may run a cluster."


class OffsetMetadataTooLargeError(SparkBrokerError):
    """The metadata string of a committed offset is too long."""

    code = 12
    hint = "Shorten the metadata to 4,096 characters or fewer."


class NetworkError(SparkBrokerError):
    """The connection broke before the answer arrived."""

    code = 13
    retriable = True
    refresh_metadata = True
    hint = "The clients retry by themselves until delivery.timeout.ms."

    def __init__(self, message: str = "", *, nobody_there: bool = False, foreign: bool = False) -> None:
        """`nobody_there`: the connection was refused, or the host's name is unknown. It is not a slow peer. `foreign`:
        something else than a broker has answered.
        """
        super().__init__(message)
        self.nobody_there = nobody_there
        self.foreign = foreign


class CoordinatorNotAvailableError(SparkBrokerError):
    """The coordinator of this group or transactional id cannot answer yet."""

    code = 15
    retriable = True
    refresh_metadata = True
    hint = "Retry; the clients do so by themselves."


class InvalidTopicError(SparkBrokerError):
    """The topic's name is not legal, or the operation is not allowed on an internal topic."""

    code = 17
    hint = (
        "Use 1 to 249 of the characters a-z, A-Z, 0-9, '.', '_' and '-'. Names that begin with '__' are internal: only "
        "the cluster makes and changes such topics."
    )


class RecordListTooLargeError(SparkBrokerError):
    """The batch is larger than a segment may be; nothing was stored."""

    code = 18
    hint = "Append smaller batches, or raise segment.bytes of the topic."


class NotEnoughReplicasError(SparkBrokerError):
    """The ISR is smaller than min.insync.replicas; nothing was stored."""

    code = 19
    retriable = True
    hint = "Wait for replicas to rejoin the ISR, or lower min.insync.replicas."


class NotEnoughReplicasAfterAppendError(SparkBrokerError):
    """The leader stored the batch, but the ISR became smaller than min.insync.replicas before it was committed."""

    code = 20
    retriable = True
    hint = "Retry (an idempotent producer stores nothing twice)."


class InvalidRequiredAcksError(SparkBrokerError):
    """acks is not one of 0, 1 and all."""

    code = 21
    hint = "Set acks to 0, 1 or 'all'."


class InvalidTimestampError(SparkBrokerError):
    """A record's timestamp is outside the accepted range."""

    code = 32
    hint = "Give a time from 1970 on, in the unit that the message names."


class InvalidGroupIdError(SparkBrokerError):
    """The name of a group, of a member or of an instance is empty or too long."""

    code = 24
    hint = "Use 1 to 249 characters in group_id and group.instance.id."


class UnknownMemberIdError(SparkBrokerError):
    """The group has no such member: its session has ended, or it has left."""

    code = 25
    hint = "Join again under another id; the clients do so by themselves. While a group has members, only they commit."


class InvalidSessionTimeoutError(SparkBrokerError):
    """The session or rebalance time-out of a member is not one that the cluster allows."""

    code = 26
    hint = "Set session.timeout.ms and max.poll.interval.ms within the bounds that the message names."


class UnsupportedVersionError(SparkBrokerError):
    """The peer speaks a protocol version that this one does not."""

    code = 35
    hint = "Use the same spark-broker version on clients and brokers."


class TopicAlreadyExistsError(SparkBrokerError):
    """A topic with this name exists."""

    code = 36
    hint = "Choose another name, or delete the topic first."


class InvalidPartitionsError(SparkBrokerError):
    """The number of partitions is not legal: it is at least 1 and never shrinks."""

    code = 37
    hint = "Partitions are 1 or more and only grow; for fewer, create another topic and copy the records."


class InvalidReplicationFactorError(SparkBrokerError):
    """The replication factor is below 1 or above the number of brokers."""

    code = 38
    hint = "Use a replication factor from 1 to the number of live brokers; `cluster.add_broker()` adds one."


class InvalidReplicaAssignmentError(SparkBrokerError):
    """A replica assignment names unknown or repeated brokers."""

    code = 39
    hint = "Name distinct, registered brokers (`spark-broker cluster status`)."


class InvalidConfigError(SparkBrokerError):
    """A setting is unknown or its value is not legal."""

    code = 40
    hint = f"Every setting, its type and default: {page('configuration')}."


class NotControllerError(SparkBrokerError):
    """The controller cannot be reached, or this process is not it."""

    code = 41
    retriable = True
    refresh_metadata = True
    hint = "Retry; if it lasts, check that the cluster's driver is running."


class InvalidRequestError(SparkBrokerError):
    """The request could not be decoded or breaks a bound of the protocol."""

    code = 42
    hint = "Use a client of the same version; nothing was changed."


class PolicyViolationError(SparkBrokerError):
    """The operation is refused by a rule of the cluster."""

    code = 44
    hint = "The message names the rule."


class OutOfOrderSequenceNumberError(SparkBrokerError):
    """A batch's sequence number does not follow the last one stored for its producer."""

    code = 45
    hint = "An earlier batch of this producer failed: close the producer and open a new one."


class DuplicateSequenceNumberError(SparkBrokerError):
    """A batch's sequence number is older than those that the broker remembers: it was stored before."""

    code = 46
    hint = "The batch is already in the log; do not send it again."


class InvalidProducerEpochError(SparkBrokerError):
    """The transaction of this producer has ended: a newer producer took its id over, or the time-out has aborted it."""

    code = 47
    hint = (
        "Abort the transaction and try it again. If the abort raises PRODUCER_FENCED, a newer producer has the "
        "transactional id: close this one."
    )


class InvalidTxnStateError(SparkBrokerError):
    """What is asked does not fit the state of the transaction."""

    code = 48
    hint = "Begin a transaction before appending, and end it before the next; after an error, abort it."


class InvalidProducerIdMappingError(SparkBrokerError):
    """The transactional id is not known here, or belongs to another producer id by now."""

    code = 49
    hint = "Open a new producer with the transactional id."


class InvalidTransactionTimeoutError(SparkBrokerError):
    """The transaction time-out is larger than the brokers allow, or not positive."""

    code = 50
    hint = "Lower transaction.timeout.ms, or raise transaction.max.timeout.ms of the cluster."


class ConcurrentTransactionsError(SparkBrokerError):
    """The transactional id's last transaction is still being completed."""

    code = 51
    retriable = True
    hint = "Retry; the clients do so by themselves."


class KafkaStorageError(SparkBrokerError):
    """The broker's disk failed for this partition."""

    code = 56
    retriable = True
    refresh_metadata = True
    hint = "Another replica takes over; check the disk of the broker that the message names."


class SyncFailedError(KafkaStorageError):
    """An fsync failed: what was written may be lost, even if a later fsync succeeds. The broker ends."""

    code = 1021
    retriable = True
    refresh_metadata = True


class UnreadableLogError(KafkaStorageError):
    """Stored bytes of a replica could not be read, twice. Clients get KAFKA_STORAGE_ERROR."""

    code = 1032
    retriable = True
    refresh_metadata = True
    hint = "No other replica in sync has these bytes: mend the disk that the message names, or seek past them."


class UnknownProducerIdError(SparkBrokerError):
    """The broker has no state for this producer id and the batch is not its first."""

    code = 59
    hint = "Close the producer and open a new one; batches that failed may be sent again by it."


class UnstableOffsetCommitError(SparkBrokerError):
    """An open transaction may still commit other offsets for the group."""

    code = 88
    retriable = True
    hint = "Clients retry by themselves. If it lasts, `spark-broker transactions list` shows which one is open."


class NonEmptyGroupError(SparkBrokerError):
    """The group has members."""

    code = 68
    hint = "Stop the group's consumers first (`spark-broker groups describe` shows them), or wait until they time out."


class ThrottlingQuotaExceededError(SparkBrokerError):
    """The broker has more requests than it can serve; nothing was done for this one."""

    code = 89
    retriable = True
    hint = "The clients wait and retry by themselves; if it lasts, add brokers and partitions, or have fewer clients."


class GroupIdNotFoundError(SparkBrokerError):
    """The group has committed no offsets."""

    code = 69
    hint = "Compare the group's name. A consumer commits with `group_id`, a streaming query with the option `group`."


class GroupMaxSizeReachedError(SparkBrokerError):
    """The group has as many members as one may have."""

    code = 81
    hint = "Use fewer consumers in the group, or raise group.max.size of the cluster."


class FencedInstanceIdError(SparkBrokerError):
    """Another consumer has taken the instance id over: this one is fenced."""

    code = 82
    hint = "Close this consumer. Exactly one process may use a group.instance.id at a time."


class GroupSubscribedToTopicError(SparkBrokerError):
    """Members of the group read the topic."""

    code = 86
    hint = "Stop the consumers that subscribe to the topic, then delete its offsets."


class FencedLeaderEpochError(SparkBrokerError):
    """The request names an older leader epoch than the partition's."""

    code = 74
    retriable = True
    refresh_metadata = True
    hint = "Refresh metadata and retry; the clients do so by themselves."


class UnknownLeaderEpochError(SparkBrokerError):
    """The request names a newer leader epoch than this broker knows."""

    code = 75
    retriable = True
    refresh_metadata = True
    hint = "Retry; the broker learns of the epoch within milliseconds."


class StaleBrokerEpochError(SparkBrokerError):
    """A later incarnation of this broker has registered."""

    code = 77
    hint = "The older incarnation exits; nothing is to be done."


class InvalidFetchSessionEpochError(SparkBrokerError):
    """A follower's fetch session has a number that is not the next one: a later session of it has begun."""

    code = 71
    hint = "The follower begins a new session by itself."


class OffsetNotAvailableError(SparkBrokerError):
    """A new leader's high watermark has not reached the start of its epoch yet."""

    code = 78
    retriable = True
    hint = "Retry; the clients do so by themselves."


class PreferredLeaderNotAvailableError(SparkBrokerError):
    """The preferred leader is not live or not in sync; the partition stays as it is."""

    code = 80
    hint = "Wait until the first replica is in the ISR (`spark-broker topics describe`)."


class EligibleLeadersNotAvailableError(SparkBrokerError):
    """No replica of the partition is live, so none can be elected."""

    code = 83
    hint = "Bring a broker of the partition's replicas back; or move a replica to a live one first, if all are lost."


class ElectionNotNeededError(SparkBrokerError):
    """The partition has the leader that the election would give it."""

    code = 84
    hint = "Nothing is to be done."


class InvalidRecordError(SparkBrokerError):
    """A record of the batch cannot be stored in the topic; nothing of the batch was stored."""

    code = 87
    hint = "A compacted topic (cleanup.policy=compact) needs a key in each record: the last record of each key stays."


class InvalidUpdateVersionError(SparkBrokerError):
    """A partition change names an older partition epoch than the current one."""

    code = 95
    hint = "The leader takes the newer state and decides again."


class DuplicateBrokerRegistrationError(SparkBrokerError):
    """Another live broker holds this id, executor or log directory."""

    code = 101
    hint = "The launcher tries again elsewhere; for a zombie, wait until it is gone."


class BrokerIdNotRegisteredError(SparkBrokerError):
    """The broker has no session with the controller."""

    code = 102
    retriable = True
    hint = "The broker registers again by itself."


class ProducerFencedError(SparkBrokerError):
    """A newer producer uses the transactional id, or a newer execution runs the application: this one is fenced."""

    code = 90
    hint = "Close this producer: exactly one process may use a transactional id at a time."


class TransactionAbortableError(SparkBrokerError):
    """The transaction cannot be committed; the producer itself is well."""

    code = 120
    hint = "Abort the transaction and try it again."


class InconsistentTopicIdError(SparkBrokerError):
    """The topic was deleted and created again under the same name."""

    code = 103
    refresh_metadata = True
    hint = "Start again with the new topic; the old one is gone, with its records."


class InconsistentClusterIdError(SparkBrokerError):
    """The log directory or the peer belongs to another cluster; nothing in it was touched."""

    code = 104
    hint = (
        "Point log.dirs and metadata.dir at directories of the same cluster, or at empty ones. A client stays with the "
        "cluster that answered first: open a new one for another cluster at the same addresses."
    )


class OlderMetadataError(SparkBrokerError):
    """metadata.dir is an older copy: a broker has seen metadata that is not there. Nothing was changed or deleted."""

    code = 1025
    hint = (
        "Stop the cluster and put the newest metadata.dir back, whole. If there is none, start with "
        f"--accept-older-metadata (accept_older_metadata=True); see {page('backup')}."
    )


class IneligibleReplicaError(SparkBrokerError):
    """A replica may not join the ISR: it is fenced, shutting down or of an older incarnation."""

    code = 107
    hint = "The leader tries again once the broker has registered."


class OffsetMovedToTieredStorageError(SparkBrokerError):
    """The record is no longer in the partition's log: it is in the topic's Delta table."""

    code = 109
    retriable = True
    refresh_metadata = True
    hint = "Read it from the table of delta.path; the clients do so once their metadata shows the topic's history."


class FencedMemberEpochError(SparkBrokerError):
    """The member's epoch is not one that the group has given it: the group goes on without what it owned."""

    code = 110
    hint = "Give up every partition and join again; the clients do so by themselves and call on_lost."


class UnreleasedInstanceIdError(SparkBrokerError):
    """Another member of the group has this instance id, and it has not left."""

    code = 111
    hint = "Close the other consumer, wait until its session ends, or use another group.instance.id."


class UnsupportedAssignorError(SparkBrokerError):
    """The group has no such assignor."""

    code = 112
    hint = "Use one of the assignors that the message names."


class StaleMemberEpochError(SparkBrokerError):
    """The member's epoch is older than the one in which it got the partition, or the partition is no longer its own."""

    code = 113
    retriable = True
    hint = "Retry with the epoch of the next heartbeat; the clients do so by themselves."


class InvalidRegularExpressionError(SparkBrokerError):
    """The pattern of a subscription is not one that topics can be matched with."""

    code = 128
    hint = "Use characters, classes, groups, '|', '.', '*', '+', '?', '{m,n}'; no look-around, no back-references."


class InvalidSubscriptionError(SparkBrokerError):
    """A member subscribes to nothing, or to what no topic can be."""

    code = 1040
    hint = "Name at least one topic, or give a pattern. To read partitions of your choice, assign them without a group."


class UnknownTopicIdError(SparkBrokerError):
    """This broker knows no topic with this id."""

    code = 100
    retriable = True
    refresh_metadata = True
    hint = "Refresh metadata; the topic may have been deleted."


class SchemaMismatchError(SparkBrokerError):
    """A batch does not match the topic's schema; nothing was stored."""

    code = 1000
    hint = "The topic's columns: `spark-broker topics describe NAME`, or `Admin.describe_topic(name).schema`."


class InvalidSchemaError(SparkBrokerError):
    """A topic schema uses a type that the log does not store."""

    code = 1001
    hint = f"The types and the names of columns that a topic can have: {page('typed-topics')}."


class UnknownSchemaError(SparkBrokerError):
    """The schema in which a batch is stored is not known here, or not yet."""

    code = 1033
    retriable = True
    refresh_metadata = True
    hint = (
        "Wait: brokers and clients learn of a new schema by themselves. After older metadata was accepted, the brokers "
        f"that have the topic's replicas tell of it: start them all; see {page('backup')}."
    )


class BootstrapUnreachableError(SparkBrokerError):
    """No broker is at any of the bootstrap addresses."""

    code = 1002
    hint = "Check bootstrap.servers and that the cluster runs (`spark-broker cluster status`)."


class DamagedLogError(SparkBrokerError):
    """Stored bytes of a replica are invalid in a place that no crash explains."""

    code = 1003
    hint = "The broker keeps the files as `*.damaged` and fetches the replica again from the leader; check the disk."


class DivergedLogError(DamagedLogError):
    """The leader's log lacks what this replica has committed, and no unclean election explains it."""

    code = 1024
    hint = f"The broker keeps this copy as `*.diverged`. How to compare it with the leader's: {page('hosting')}."


class LogDirectoryLockedError(SparkBrokerError):
    """Another live process holds the log directory."""

    code = 1004
    retriable = True
    hint = "Wait for the process that the message names to end, or end it."


class StorageRefusedError(SparkBrokerError):
    """The broker could not store this now; nothing of it was stored, and reads go on."""

    code = 1022
    retriable = True
    hint = "The broker's log says what it lacks."


class StorageFullError(StorageRefusedError):
    """The broker's disk is full; nothing was stored, reads go on."""

    code = 1005
    hint = "Free space or lower retention.bytes / retention.ms."


class ProcessLimitError(StorageRefusedError):
    """The broker's process has reached a limit (open files, a file's size, memory); nothing was stored or is broken."""

    code = 1023
    hint = "Raise the limit that the message names (`ulimit`, memory), or close clients that are not needed."


class NoMemoryError(ProcessLimitError):
    """The process has no memory for this; nothing of it was done, and nothing is broken."""

    code = 1026
    hint = f"Raise the limit that the message names, or free memory. What takes a broker's: {page('hosting')}."


class NoThreadError(ProcessLimitError):
    """The process can start no thread for this; nothing of it was done, and nothing is broken."""

    code = 1027
    hint = "Raise the limit that the message names (`ulimit -u`, pids.max, kernel.threads-max), or have fewer clients."


class ClientEndedError(SparkBrokerError):
    """A thread of this client ended on an unexpected error, so the client cannot go on."""

    code = 1028
    hint = "Close it and open a new one. This is a bug of spark-broker: please report it with your program's log."


class ClosedError(SparkBrokerError):
    """The client is closed."""

    code = 1006
    hint = "Open a new one."


class BufferExhaustedError(SparkBrokerError):
    """The producer's buffer stayed full for max.block.ms."""

    code = 1007
    hint = "Append more slowly, raise buffer.memory, or check that brokers acknowledge."


class UnsupportedSparkError(SparkBrokerError):
    """This Spark session or its settings cannot host brokers."""

    code = 1008
    hint = f"Build the session with configure_spark(). Which settings it needs, and why: {page('hosting')}."


class MetadataStoreError(SparkBrokerError):
    """The metadata directory cannot be used: it is damaged, or its store has no exclusive create."""

    code = 1009
    hint = (
        "Point metadata.dir at a local path or an object store with conditional puts. If what is there is damaged or "
        f"incomplete, put a copy back: {page('backup')}."
    )


class ClusterStartError(SparkBrokerError):
    """Brokers did not come up in time."""

    code = 1010
    hint = "Look at the log that the message names; are there enough executors and cores?"


class MissingDependencyError(SparkBrokerError):
    """An optional package, or Java, is not installed."""

    code = 1011
    hint = "Install it, and run the same again."


class StaleLaunchError(SparkBrokerError):
    """A broker process of a superseded launch asked to register."""

    code = 1012
    hint = "The process exits; nothing is to be done."


class InvalidDataError(SparkBrokerError):
    """The data handed in is not of the form that is expected; nothing of it was stored."""

    code = 1013
    hint = "Change the data to what the message asks for."


class AlreadyCommittedError(SparkBrokerError):
    """This version of the application was committed before: its records are there, once."""

    code = 1014
    hint = "Nothing is to be done: go on with the next version."


class LogTruncationError(OffsetOutOfRangeError):
    """An unclean election lost records that the consumer had read. Their offsets have other records now."""

    code = 1015
    hint = "Undo what came of the records from the divergent offset on, then seek to it; or set auto.offset.reset."

    def __init__(self, message: str = "", divergent_offset: int = -1, diverging_epoch: int = -1) -> None:
        """`divergent_offset`: the first offset that is known to differ from what was read; -1: none is known.

        `diverging_epoch`: the leader epoch that ends there in the log as it is now.
        """
        super().__init__(message)
        self.divergent_offset = divergent_offset
        self.diverging_epoch = diverging_epoch


class ClusterInUseError(SparkBrokerError):
    """Another cluster that is alive uses these directories; nothing was touched."""

    code = 1016
    hint = "Stop that cluster, or start with --take-over (take_over=True), which ends its controller and its brokers."


class LogDirectoryNotUsableError(SparkBrokerError):
    """The broker's process may not read or write its log directory, or cannot make it."""

    code = 1017
    hint = "Give that user the rights there, mount the disk writable, or set log.dirs to another directory."


class HistoryConflictError(SparkBrokerError):
    """The topic's history is in another Delta table, or another tierer has moved it on."""

    code = 1018
    hint = "Tier again: it goes on from the history as it is now. If it repeats, set delta.path to the topic's table."


class TieringStoppedError(SparkBrokerError):
    """The topic's records cannot go into its Delta table. The topic goes on serving all that it has."""

    code = 1019
    hint = "Mend what the message says and tier again. Until then brokers keep everything that is not in the table."


class HistoryNotFoundError(TieringStoppedError):
    """A run does not find in the topic's Delta table what is recorded to be there: it is gone, another, or unreadable.

    The brokers may have the last copy. They delete nothing for being in the table until a run finds it again.
    """

    code = 1034
    hint = (
        "Let the run read the table, or put it back as it was, from a backup; then tier again. "
        "Until then brokers keep all they have."
    )


class RecordNotShowableError(SparkBrokerError):
    """A record has a value that Python cannot show, such as a time after the year 9999. It is stored as it is."""

    code = 1029
    hint = "Read it as Arrow (the batches of `poll`) or as a DataFrame, or seek past it."


class ForkedProcessError(SparkBrokerError):
    """A client was opened, and then the process was forked: the child has neither its threads nor its connections."""

    code = 1030
    hint = "Open clients of its own in the child, or start it with multiprocessing.get_context('spawn')."


class ReentrantCallError(SparkBrokerError):
    """A client was called from within one of its own calls, and would wait for itself: nothing was done."""

    code = 1031
    hint = (
        "In a signal handler set a flag or raise SystemExit: the end of `with Producer(...)` flushes. In a callback "
        "hand the call to another thread; close(0) works there, and fails what is under way."
    )


class StaleMetadataError(SparkBrokerError):
    """A leader's answer rests on metadata that this client does not have yet."""

    code = 1020
    retriable = True
    refresh_metadata = True
    hint = "Try again: brokers learn of it within a heartbeat. If it repeats, one is cut off from the controller."


class InvariantError(Exception):
    """An invariant of spark-broker does not hold: our own bug. The process stops rather than go on.

    It is not a SparkBrokerError: code that handles refusals and failures must not handle it as one of them.

    `message`: what does not hold. `concerning` sets the machine (`whose`), its `state` and its `last_events` (oldest
    first). The text of the error contains all of these.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.whose = ""
        self.state = ""
        self.last_events: tuple[str, ...] = ()

    def concerning(self, whose: str, state: str, last_events: Iterable[str] = ()) -> None:
        """Set whose invariant it is. The innermost machine calls first; later calls change nothing."""
        if not self.whose:
            self.whose, self.state, self.last_events = whose, state, tuple(last_events)

    def __str__(self) -> str:
        text = f"invariant broken: {self.message}"
        if not self.whose:
            return text
        events = "".join(f"\n    {event}" for event in self.last_events) or " none"
        return f"{text}\n  of: {self.whose}\n  state: {self.state}\n  last events:{events}"


def _table() -> dict[int, type[SparkBrokerError]]:
    table: dict[int, type[SparkBrokerError]] = {}
    kinds: list[type[SparkBrokerError]] = SparkBrokerError.__subclasses__()
    while kinds:
        kind = kinds.pop()
        if kind.code in table:
            raise InvariantError(f"two errors have code {kind.code}")
        table[kind.code] = kind
        kinds += kind.__subclasses__()
    return table


ERRORS: dict[int, type[SparkBrokerError]] = _table()
"""Code to error type."""


def error_from_code(code: int, message: str) -> SparkBrokerError:
    """The error that a peer sent as `(code, message)`; an unknown code becomes `UnknownServerError`."""
    kind = ERRORS.get(code)
    if kind is None:
        return UnknownServerError(f"error code {code}: {message}")
    return kind(message)


def again(error: AnyError) -> AnyError:
    """The error for one more caller. Whoever keeps an error and raises it raises a fresh one each time: the one that is
    kept would grow by a frame each time, and the frames would keep alive whatever had a part in it.
    """
    fresh = copy.copy(error).with_traceback(None)
    fresh.__cause__ = error.__cause__
    return fresh


def invariant(condition: bool, message: str, *values: object) -> None:
    """Stop on a bug of our own: raises InvariantError(message % values). `python -O` would remove an `assert`.

    The text is formatted only when the condition is false: a check on the path of every batch costs only a call.
    """
    if not condition:
        broken(message, *values)


def broken(message: str, *values: object) -> NoReturn:
    """Raises InvariantError(message % values). For callers that test a condition often for each batch."""
    raise InvariantError(message % values if values else message)
