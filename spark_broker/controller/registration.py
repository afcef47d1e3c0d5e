"""Whether a broker's process may register, and what its registration changes."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from spark_broker.controller import lineage
from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.election import Election, elect
from spark_broker.controller.identity import BrokerIdentity, identify
from spark_broker.controller.image import BrokerState, MetadataImage
from spark_broker.controller.partition_change import change
from spark_broker.controller.records import MetadataRecord, PartitionChangeRecord, RegisterBrokerRecord
from spark_broker.errors import (
    DuplicateBrokerRegistrationError,
    InconsistentClusterIdError,
    InvalidRequestError,
    StaleLaunchError,
    UnsupportedVersionError,
)
from spark_broker.protocol.messages import ANY_INCARNATION, PROTOCOL_VERSION, UNRECORDED, RegisterBrokerRequest

_HOST = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,255}")
"""Names and addresses, also of IPv6."""

_DIRECTORY = re.compile(r"(/(?!\.{0,2}/)[^/\0\n]+)*/broker-[0-9]+")
"""An absolute path without `.`, `..` or an empty part, to the directory of a slot (`storage.directory.SLOT_PREFIX`)."""

START_KINDS = ("clean", "process_crash", "machine_crash")


@dataclass(frozen=True, slots=True)
class RegistrationRules:
    """What a registration needs beside the image.

    connected: brokers with a session. lost_launches: launches that Spark reported as lost. lost_brokers: brokers whose
    directories count as lost. shared_executor: all brokers run in one executor (plain `local[N]`).
    disks: what brokers say of theirs.
    """

    connected: Collection[int] = ()
    lost_launches: Collection[int] = ()
    lost_brokers: Collection[int] = ()
    shared_executor: bool = False
    disks: Disks = ALL_WELL


@dataclass(frozen=True, slots=True)
class Registration:
    """`resumed`: the same process came back; nothing changes, its epoch stays. `older_copy`: its directory is one.

    `also_on`: the machine of another process whose directory has the same id, and which is connected; empty: none is.
    """

    broker_id: int
    broker_epoch: int
    resumed: bool
    new_id: bool = False
    older_copy: bool = False
    also_on: str = ""
    records: tuple[MetadataRecord, ...] = field(default=())


def register(image: MetadataImage, request: RegisterBrokerRequest, rules: RegistrationRules) -> Registration:
    """Register a process. Raises UnsupportedVersionError, InvalidRequestError, InconsistentClusterIdError,
    StaleLaunchError, DuplicateBrokerRegistrationError or OlderMetadataError; then nothing changed."""
    _check_request(image, request)
    if request.launch in rules.lost_launches:
        raise StaleLaunchError(f"Spark reported launch {request.launch} as lost")
    newer = lineage.newer_than(image, request.seen)
    identity = identify(image, request, rules.lost_brokers, forgotten=lineage.is_accepted(image))
    previous = image.brokers.get(identity.broker_id)
    if previous is not None and _is_same_process(previous, request):
        return Registration(previous.id, previous.epoch, resumed=True)
    if previous is not None:
        _check_launch(previous, request, rules)
    if not rules.shared_executor:
        _check_executor(image, identity.broker_id, request, rules)
    beyond = () if newer is None else tuple(lineage.beyond(image, newer))
    record = _record(image.apply(beyond), identity, request)
    older_copy = previous is not None and _is_older_copy(previous, request)
    lost = identity.new_directory or older_copy or request.start_kind == "machine_crash"
    changes = _end_previous_incarnation(image, identity.broker_id, rules.disks, lost=lost)
    return Registration(
        broker_id=identity.broker_id,
        broker_epoch=record.broker_epoch,
        resumed=False,
        new_id=previous is None,
        older_copy=older_copy,
        also_on=_also_on(previous, request, rules),
        records=(*beyond, record, *changes),
    )


def _check_request(image: MetadataImage, request: RegisterBrokerRequest) -> None:
    if request.version != PROTOCOL_VERSION:
        raise UnsupportedVersionError(f"the broker speaks version {request.version}, the controller {PROTOCOL_VERSION}")
    if request.cluster_id not in ("", image.cluster_id):
        raise InconsistentClusterIdError(f"the broker is of cluster {request.cluster_id}, this is {image.cluster_id}")
    if request.start_kind not in START_KINDS:
        raise InvalidRequestError(f"start kind {request.start_kind!r}")
    if not _HOST.fullmatch(request.host) or not request.port:
        # Every broker and client would try to connect to it, and not every text can be an address.
        raise InvalidRequestError(f"a broker cannot be reached at host {request.host!r}, port {request.port}")
    if request.directory and not _DIRECTORY.fullmatch(request.directory):
        # Readers on the broker's machine open what is in there.
        raise InvalidRequestError(f"{request.directory!r} is the log directory of no broker")
    if not request.directory_id or not request.incarnation:
        raise InvalidRequestError("a registration without a directory id or an incarnation")
    if not 1 <= request.launch <= image.last_launch:
        raise InvalidRequestError(f"launch {request.launch} was never given out")


def _is_same_process(previous: BrokerState, request: RegisterBrokerRequest) -> bool:
    return (
        previous.incarnation == request.incarnation
        and previous.launch == request.launch
        and previous.directory_id == request.directory_id
    )


def _check_launch(previous: BrokerState, request: RegisterBrokerRequest, rules: RegistrationRules) -> None:
    if request.launch < previous.launch:
        raise StaleLaunchError(f"launch {request.launch} of broker {previous.id} is superseded by {previous.launch}")
    # Spark's own retry of a task runs under the same launch: it waits until the earlier process is gone.
    if request.launch == previous.launch and previous.id in rules.connected:
        raise DuplicateBrokerRegistrationError(f"broker {previous.id} of launch {request.launch} is still connected")


def _check_executor(
    image: MetadataImage, broker_id: int, request: RegisterBrokerRequest, rules: RegistrationRules
) -> None:
    """One broker per executor: Spark may put two tasks on one executor, and their replicas would die together."""
    for other in rules.connected:
        broker = image.brokers.get(other)
        if broker is None or other == broker_id:
            continue
        if (broker.machine, broker.executor_id) == (request.machine, request.executor_id):
            raise DuplicateBrokerRegistrationError(
                f"executor {request.executor_id} on {request.machine} already runs broker {other}"
            )


def _recorded(previous: BrokerState | None, request: RegisterBrokerRequest) -> str:
    """The newest incarnation that the directory is known to know. One whose disk was full could not be recorded."""
    if not request.incarnation.startswith(UNRECORDED):
        return request.incarnation
    return previous.recorded if previous is not None and previous.directory_id == request.directory_id else ""


def _also_on(previous: BrokerState | None, request: RegisterBrokerRequest, rules: RegistrationRules) -> str:
    if previous is None or previous.directory_id != request.directory_id or previous.id not in rules.connected:
        return ""
    return previous.machine if previous.machine != request.machine else ""


def _record(image: MetadataImage, identity: BrokerIdentity, request: RegisterBrokerRequest) -> RegisterBrokerRecord:
    return RegisterBrokerRecord(
        broker_id=identity.broker_id,
        broker_epoch=image.next_offset,
        directory_id=request.directory_id,
        incarnation=request.incarnation,
        launch=request.launch,
        host=request.host,
        port=request.port,
        rack=request.rack,
        machine=request.machine,
        executor_id=request.executor_id,
        executor_pid=request.executor_pid,
        pid=request.pid,
        pid_start_time=request.pid_start_time,
        start_kind=request.start_kind,
        log=request.log,
        directory=request.directory,
        recorded=_recorded(image.brokers.get(identity.broker_id), request),
    )


def _is_older_copy(previous: BrokerState, request: RegisterBrokerRequest) -> bool:
    """Whether the directory does not know the process that registered with it last: it was restored from a backup.

    A copy that is not older than the last registration is not noticed so. A log that ends below what it has committed
    is (`broker/log_opener.py`).
    """
    if previous.directory_id != request.directory_id or not request.earlier or ANY_INCARNATION in request.earlier:
        return False
    return bool(previous.recorded) and previous.recorded not in request.earlier


def _end_previous_incarnation(
    image: MetadataImage, broker_id: int, disks: Disks, *, lost: bool
) -> list[PartitionChangeRecord]:
    """Its leaderships end. An (epoch, offset) then still names one batch, even if the new process has lost batches.

    `lost`: it may have lost batches (machine crash, empty or older directory). Only then does the broker leave ISRs and
    ELRs. Where it was the last of both, the partition has no leader before all logs have been compared
    (`unclean.recover`), or the loss is accepted.
    """
    records = []
    for topic, number, state in image.partitions():
        if broker_id not in state.isr and broker_id not in state.elr:
            continue
        election = Election(state.leader, state.isr)
        if state.leader == broker_id:
            election = elect(state, disks.electable(image, (topic.topic_id, number), without=(broker_id,)), disks)
        without = (broker_id,) if lost else ()
        record = change(topic, number, state, leader=election.leader, isr=election.isr, lost=without)
        if record is not None:
            records.append(record)
    return records


def older_copy(broker_id: int, launch: int, also_on: str) -> str:
    """The line for the log. `also_on`: see Registration."""
    if also_on:
        return (
            f"the log directory of broker {broker_id} of launch {launch} is also on machine {also_on}, where a broker "
            "uses it: they end each other by turns. One of the two is a copy: move it out of log.dirs. The replicas of "
            "this one leave every ISR and are brought up to date by their leaders"
        )
    return (
        f"the log directory of broker {broker_id} of launch {launch} is an older copy, or has lost files: it does not "
        "know the process that registered with it last, or what it had committed. Its replicas leave every ISR and are "
        "brought up to date by their leaders"
    )
