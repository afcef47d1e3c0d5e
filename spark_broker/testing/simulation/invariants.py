"""What must hold after every event. Each rule is a function that names its bug (docs/known-bugs.md).

The checks are cheap because they are incremental: they look only at the process to which the event happened, and there
only at replicas whose offsets, role or epoch changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spark_broker.broker.partition import Partition
from spark_broker.controller.delta import MetadataDelta
from spark_broker.controller.image import EMPTY_IMAGE, MetadataImage, PartitionRegistration
from spark_broker.controller.records import MetadataRecord
from spark_broker.core.replica import Replica, Role
from spark_broker.errors import DamagedLogError, OffsetNotAvailableError, SparkBrokerError
from spark_broker.model import INTERNAL_PREFIX, NO_LEADER
from spark_broker.protocol.frame import BatchHeader
from spark_broker.protocol.messages import ACKS_ALL, AppendRequest
from spark_broker.protocol.wire import Buffer
from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.batches import decoded
from spark_broker.testing.simulation.metadata_rules import (
    check_epochs,
    check_joined,
    check_metadata_grows,
    check_sets,
    described,
)
from spark_broker.testing.simulation.shadow import CommittedLog, Key, ReplicaShadow
from spark_broker.testing.simulation.trace import TraceKind
from spark_broker.testing.simulation.transaction_rules import check_opened, same_producers
from spark_broker.testing.simulation.violation import ViolationError

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess
    from spark_broker.testing.simulation.machine import SimulatedMachine
    from spark_broker.testing.simulation.world import World


class Invariants:
    """All rules, and what they remember from event to event."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.image = EMPTY_IMAGE  # the newest that the metadata log holds
        self.committed: dict[Key, CommittedLog] = {}
        self.shadows: dict[tuple[int, Key], ReplicaShadow] = {}
        self._unreadable: dict[tuple[int, Key], tuple[object, ...]] = {}
        self._images: dict[int, MetadataImage] = {}
        self._seen_images: dict[str, MetadataImage] = {}
        self._leaders: dict[tuple[Key, int], str] = {}
        self._shown: dict[Key, dict[int, tuple[int, int]]] = {}
        self._acknowledged: list[tuple[BrokerProcess, AppendRequest, Buffer, int]] = []

    def check(self, process: BrokerProcess) -> None:
        """Check the rules after an event of this broker."""
        image = process.manager.image
        if self._seen_images.get(process.name) is not image:
            self._seen_images[process.name] = image
            self._check_prefix(process, image)
            self.forget_dropped(process)
        self._check_damage(process)
        for partition in process.manager.partitions():
            replica = partition.replica
            shadow = self.shadows.get((process.machine.number, partition.key))
            if replica.role is Role.STOPPED:
                if shadow is not None:
                    shadow.interrupted = True  # its disk has failed, or has refused a change half-way
                continue
            state = (
                process.name,
                replica.log_end_offset,
                replica.high_watermark,
                replica.log_start_offset,
                replica.role,
                replica.assignment.leader_epoch,
                replica.epochs,
                partition.log.size_bytes,
            )
            if (shadow is None or shadow.state != state) and self._check_readable(process, partition, shadow, state):
                self.shadows[process.machine.number, partition.key].state = state
        if self._acknowledged:
            acknowledged, self._acknowledged = self._acknowledged, []
            with process.fs.undisturbed():
                for answer in acknowledged:
                    self._check_acknowledged(*answer)

    def _check_readable(
        self, process: BrokerProcess, partition: Partition, shadow: ReplicaShadow | None, state: tuple[object, ...]
    ) -> bool:
        """Check a replica. False: we met damage before its process did, and do not know what the replica holds."""
        place = process.machine.number, partition.key
        if self._unreadable.get(place) == state:
            return False
        try:
            with process.fs.undisturbed():
                self._check_replica(process, partition, shadow)
        except DamagedLogError:
            if place not in self._world.bit_flips.latent:
                raise
            self._unreadable[place] = state
            return False
        self._unreadable.pop(place, None)
        return True

    def is_blind(self, key: Key) -> bool:
        """Whether a replica has damage that only we have met: what it took for committed was not checked."""
        return any(unreadable_key == key for _, unreadable_key in self._unreadable)

    def interrupted(self, machine: SimulatedMachine) -> None:
        """The machine's process ended while it changed its files."""
        for (number, _), shadow in self.shadows.items():
            if number == machine.number:
                shadow.interrupted = True

    def died(self, process: BrokerProcess) -> None:
        """The process died within an event. Its files are gone: only the history judges what it acknowledged there."""
        self._acknowledged = [answer for answer in self._acknowledged if answer[0] is not process]

    def acknowledged(self, process: BrokerProcess, request: AppendRequest, message: Buffer, base_offset: int) -> None:
        """A broker answers an append. The answer is checked after the event."""
        self._acknowledged.append((process, request, message, base_offset))

    def metadata_committed(self, read: MetadataImage, records: Sequence[MetadataRecord], image: MetadataImage) -> None:
        """The metadata log holds a new file: its controller had read the log up to `read`."""
        for key in self._world.unclean.written(self.image, read, records):
            self.committed.pop(key, None)
            self._shown.pop(key, None)
        before, self.image = self.image, image
        if self._world.tiering is not None:
            self._world.tiering.recorded(before, image)
        self._images[image.next_offset] = image
        check_metadata_grows(before, image)
        for broker_id, broker in image.brokers.items():
            earlier = before.brokers.get(broker_id)
            if earlier is None or earlier.epoch != broker.epoch:
                self._world.registered(broker)
        for key in MetadataDelta(before, image).partitions_changed:
            state = image.partition(*key)
            if state is not None:
                self._check_partition(key, before.partition(*key), state)
                check_joined(self._name(key), key, before, image)

    def metadata_replaced(self, image: MetadataImage) -> None:
        """An operator goes on with a metadata log that is this old. What it does not know counts as gone."""
        self.image = image
        self._images = {}
        for number, key in list(self.shadows):
            state, machine = image.partition(*key), self._world.machines[number]
            if state is None or machine.broker_id not in state.replicas:
                self.forget(machine, key)
        for key in [key for key in self.committed if image.partition(*key) is None]:
            del self.committed[key]

    def _check_prefix(self, process: BrokerProcess, image: MetadataImage) -> None:
        """Known bug 18: a broker's metadata is a prefix of the controller's."""
        committed = self._images.get(image.next_offset)
        if image.next_offset and image is not committed and image != committed:
            raise ViolationError(
                "metadata is a prefix", f"{process.name} has an image at {image.next_offset} that nobody committed"
            )

    def _check_damage(self, process: BrokerProcess) -> None:
        """Known bugs 26, 27: a crash leaves no damage, and what was synced is not lost. Every replica is intact.

        Known bug 28: a replica with a bit flip is excepted. It then counts as another replica, and is not in sync.
        """
        for key in self._world.bit_flips.look(process):
            causes = (self._world.bit_flips.was_damaged, self._world.lost_files.was_shortened)
            if not any(was_struck(process.machine, key) for was_struck in causes):
                message = f"{process.name} set its replica aside, and nothing has damaged it"
                raise ViolationError("damage has a cause", message, self._name(key))
            self.forget(process.machine, key)

    def _check_partition(self, key: Key, before: PartitionRegistration | None, state: PartitionRegistration) -> None:
        name = self._name(key)
        if before is not None:
            check_epochs(name, before, state)
            if state.leader_epoch > before.leader_epoch and state.leader != NO_LEADER:
                self._world.trace.count("elections")
            if len(state.isr) < len(before.isr):
                self._world.trace.count("ISR shrinks")
            elif len(state.isr) > len(before.isr):
                self._world.trace.count("ISR grows")
        if self._world.trace.wants_notes:
            self._world.note("metadata", TraceKind.METADATA, f"{name}: {described(state)}", name)
        check_sets(name, state)
        for machine in self._world.machines:
            if machine.broker_id not in state.replicas:
                self.forget(machine, key)
        for broker_id in (*state.isr, *state.elr):
            self._check_member(key, broker_id, state)

    def _check_member(self, key: Key, broker_id: int, state: PartitionRegistration) -> None:
        """Known bugs 1, 2, 9, 10, 11, 12: every broker that may be elected has everything that was ever committed."""
        committed = self.committed.get(key)
        machine = self._world.machine_of(broker_id)
        if committed is None or machine is None or machine.incomplete:
            return
        if self._world.bit_flips.is_quarantined(machine, key) or (machine.number, key) in self._unreadable:
            return  # the damage is about to be reported to the controller
        shadow = self.shadows.get((machine.number, key))
        if shadow is not None:
            shadow.match(committed)
        matched = shadow.matched if shadow is not None else 0
        if matched < committed.end_offset:
            raise ViolationError(
                "members have all that is committed",
                f"broker {broker_id} ({machine}) is in ISR {state.isr} or ELR {state.elr} of {committed.name} and has "
                f"the committed records up to {matched} of {committed.end_offset}",
                committed.name,
            )

    def _check_replica(self, process: BrokerProcess, partition: Partition, shadow: ReplicaShadow | None) -> None:
        key, replica, name = partition.key, partition.replica, str(partition)
        opened = shadow is None or shadow.process != process.name
        if shadow is None or opened or shadow.state[3:6] != _role(replica):
            self._note_role(process, replica, name)
        if shadow is None or opened:
            shadow = self.shadows[process.machine.number, key] = self._opened(process, partition, shadow)
        self._check_bounds(process, replica, name)
        self._follow_log(process, partition, shadow)
        if replica.role is Role.LEADER:
            self._check_only_leader(process, key, replica, name)
        if self._world.tiering is not None:
            self._world.tiering.check_start(process, partition)
            if replica.role is Role.LEADER:
                self._world.tiering.check_log(process, partition)
        if key in self._world.unclean.released:
            return
        self._check_high_watermark(process, replica, shadow, name)
        if opened:
            self._check_opened(process, partition, shadow)
        self._check_committed(process, partition, shadow)
        if opened:
            self._check_still_member(process, partition)
        if self._world.transactional is not None:
            self._world.transactional.rules.check_replica(process, partition)
        self._world.compactions.look(process, partition, self.committed.get(partition.key))
        if replica.role is Role.LEADER:
            self._check_latest_offset(key, replica, name)

    def _check_opened(self, process: BrokerProcess, partition: Partition, shadow: ReplicaShadow) -> None:
        compacts, committed = self._world.cleaning_ms > 0, self.committed.get(partition.key)
        if compacts and committed is not None and partition.replica.log_end_offset < committed.end_offset:
            return  # it is copying a compacted log, which has places for the newest batches only
        if compacts or self._world.transactional is not None:
            check_opened(process, partition, shadow.headers, expire=self._world.producers_expire)

    def _check_committed(self, process: BrokerProcess, partition: Partition, shadow: ReplicaShadow) -> None:
        """What this replica takes for committed agrees with all other replicas, or is committed by it now."""
        high_watermark = partition.replica.high_watermark
        committed = self.committed.setdefault(partition.key, CommittedLog(str(partition)))
        different = shadow.match(committed)
        if high_watermark > committed.end_offset:
            if different is not None:
                self._conflict(process, committed, different)
            self._commit(process, partition, shadow, committed)
        if different is not None and different.base_offset < high_watermark:
            self._conflict(process, committed, different)

    def _note_role(self, process: BrokerProcess, replica: Replica, name: str) -> None:
        if self._world.trace.wants_notes:
            text = (
                f"is {replica.role.value} in epoch {replica.assignment.leader_epoch}; its log ends at "
                f"{replica.log_end_offset}, high watermark {replica.high_watermark}, epochs {replica.epochs.to_pairs()}"
            )
            self._world.note(process.name, TraceKind.REPLICA, text, name)

    def _opened(self, process: BrokerProcess, partition: Partition, before: ReplicaShadow | None) -> ReplicaShadow:
        """A process opened the replica: what its predecessor had written is there, unless the machine went down."""
        shadow = ReplicaShadow(process=process.name)
        shadow.begin_at(partition.replica.log_start_offset)
        shadow.append(self._headers(partition, partition.replica.log_start_offset, before))
        shadow.end_offset = max(shadow.end_offset, partition.replica.log_end_offset)
        after_machine_crash = process.directory.start_kind is StartKind.MACHINE_CRASH
        lost_by_design = after_machine_crash or process.machine.incomplete
        lost_by_design = lost_by_design or self._world.lost_files.was_shortened(process.machine, partition.key)
        if before is not None and not lost_by_design:
            start = max(shadow.start_offset, before.start_offset)  # on a full disk, deleted records may still be there
            kept, headers = ([h for h in of.headers if h.base_offset >= start] for of in (before, shadow))
            kept = kept[: len(headers)] if before.interrupted else kept
            if headers[: len(kept)] != kept:
                raise ViolationError(
                    "a process crash loses nothing",
                    f"{process.name} opened a log up to {shadow.end_offset}; its predecessor had {before.end_offset}",
                    str(partition),
                )
        return shadow

    def _follow_log(self, process: BrokerProcess, partition: Partition, shadow: ReplicaShadow) -> None:
        """Bring the shadow up to date. Known bugs 19 and 20 are checked whenever the log became shorter."""
        replica = partition.replica
        if replica.log_start_offset > shadow.start_offset:
            shadow.begin_at(replica.log_start_offset)
            self._check_producers(process, partition)
        another = replica.log_start_offset < shadow.start_offset  # the replica was dropped, and added again
        if replica.log_end_offset == replica.log_start_offset and (shadow.headers or another):
            shadow.headers.clear()  # rebuilt, or all of it removed
            shadow.start_offset = shadow.end_offset = shadow.matched = replica.log_end_offset
            shadow.high_watermark = min(shadow.high_watermark, replica.log_end_offset)
            self._check_producers(process, partition)
        elif replica.log_end_offset < shadow.end_offset:
            self._world.trace.count("truncations")
            text = f"cuts its log from {shadow.end_offset} to {replica.log_end_offset}"
            self._world.note(process.name, TraceKind.REPLICA, text, str(partition))
            shadow.cut(replica.log_end_offset)
            self._check_producers(process, partition)
            self._check_still_member(process, partition)
        if replica.log_end_offset > shadow.end_offset:
            shadow.append(self._headers(partition, shadow.end_offset))
        if shadow.headers and shadow.end_offset != replica.log_end_offset:
            raise ViolationError(
                "log and replica agree",
                f"{process.name}: the log ends at {shadow.end_offset}, the replica at {replica.log_end_offset}",
                str(partition),
            )

    def _headers(
        self, partition: Partition, from_offset: int, before: ReplicaShadow | None = None
    ) -> list[BatchHeader]:
        """The headers of a log from an offset on, as they were before compaction. Where nothing is committed for good,
        `before` says how they were.
        """
        committed = self.committed.get(partition.key) or (None if before is None else before.as_committed())
        return self._world.compactions.as_committed(partition.log.headers(from_offset), committed)

    def _check_still_member(self, process: BrokerProcess, partition: Partition) -> None:
        """Known bugs 1, 9: an electable replica does not truncate committed records, nor restart without them."""
        state = self.image.partition(*partition.key)
        if state is not None and process.machine.broker_id in (*state.isr, *state.elr):
            self._check_member(partition.key, process.machine.broker_id, state)

    def _check_producers(self, process: BrokerProcess, partition: Partition) -> None:
        """Known bugs 19, 20: after truncation and retention the producers' state is the one that the log gives."""
        rebuilt = partition.log.rebuild_producers(partition.replica.high_watermark)
        if not same_producers(partition, rebuilt, expire=self._world.producers_expire):
            raise ViolationError(
                "producers follow the log", f"{process.name}: the state differs from the log's", str(partition)
            )

    def _check_bounds(self, process: BrokerProcess, replica: Replica, name: str) -> None:
        """Known bug 15: log start <= high watermark <= log end. Known bug 5: epochs begin at or before the log end."""
        if not replica.log_start_offset <= replica.high_watermark <= replica.log_end_offset:
            raise ViolationError(
                "offsets are in order",
                f"{process.name}: log start {replica.log_start_offset}, high watermark {replica.high_watermark}, "
                f"log end {replica.log_end_offset}",
                name,
            )
        entries = replica.epochs.entries
        bound = replica.log_end_offset - (replica.role is Role.FOLLOWER)
        if entries and entries[-1].start_offset > max(bound, replica.log_start_offset):
            raise ViolationError(
                "no epoch begins past the log end",
                f"{process.name} ({replica.role.value}): log end {replica.log_end_offset}, its epochs {entries[-1]}",
                name,
            )

    def _check_high_watermark(self, process: BrokerProcess, replica: Replica, shadow: ReplicaShadow, name: str) -> None:
        """Within one process the high watermark never falls."""
        if replica.high_watermark < shadow.high_watermark:
            raise ViolationError(
                "the high watermark never falls",
                f"{process.name}: {shadow.high_watermark} -> {replica.high_watermark}",
                name,
            )
        shadow.high_watermark = replica.high_watermark

    def _commit(
        self, process: BrokerProcess, partition: Partition, shadow: ReplicaShadow, committed: CommittedLog
    ) -> None:
        """Known bug 10: when a record is committed, every member that may be elected has it already."""
        first_new = len(committed.headers)
        committed.extend(shadow.headers, partition.replica.high_watermark, process.name)
        if self._world.transactional is not None:
            self._world.transactional.rules.committed(partition.key, committed.name, committed.headers[first_new:])
        if self._world.keeps_values and not partition.topic.name.startswith(INTERNAL_PREFIX):
            for header in committed.headers[first_new:]:
                frames = partition.log.read(header.base_offset, 1, header.next_offset)
                if not frames:
                    raise ViolationError(
                        "what becomes committed is still whole",
                        f"{process.name}: {header.base_offset} to {header.next_offset} is not there",
                        str(partition),
                    )
                committed.values[header.base_offset] = decoded(frames[0].message)
        shadow.match(committed)
        state = self.image.partition(*partition.key)
        if state is None:
            return
        for broker_id in (*state.isr, *state.elr):
            self._check_member(partition.key, broker_id, state)

    def _conflict(self, process: BrokerProcess, committed: CommittedLog, different: object) -> None:
        """Known bug 13: what is committed is the same everywhere, for ever."""
        raise ViolationError(
            "committed records never change",
            f"{process.name} takes {different} for committed; others have another batch there",
            committed.name,
        )

    def _check_only_leader(self, process: BrokerProcess, key: Key, replica: Replica, name: str) -> None:
        """At most one process leads a partition in an epoch."""
        epoch = replica.assignment.leader_epoch
        first = self._leaders.setdefault((key, epoch), process.name)
        if first != process.name:
            raise ViolationError("one leader an epoch", f"{first} and {process.name} lead in epoch {epoch}", name)

    def _check_latest_offset(self, key: Key, replica: Replica, name: str) -> None:
        """Known bug 14, KIP-207: a client that goes from a leader to a newer one is never shown a smaller offset."""
        epoch = replica.assignment.leader_epoch
        try:
            latest = replica.latest_offset(epoch)
        except OffsetNotAvailableError:
            return
        shown = self._shown.setdefault(key, {})
        shown[epoch] = (shown.get(epoch, (latest, latest))[0], latest)
        for other, (first, last) in shown.items():
            if (other < epoch and last > shown[epoch][0]) or (other > epoch and latest > first):
                raise ViolationError(
                    "the latest offset never falls",
                    f"epoch {other} showed {first} to {last}, epoch {epoch} shows {shown[epoch][0]} to {latest}",
                    name,
                )

    def _check_acknowledged(
        self, process: BrokerProcess, request: AppendRequest, message: Buffer, base_offset: int
    ) -> None:
        """Known bugs 8, 10, 22: an acknowledged batch is committed (acks=all), at its offset, in the epoch it named."""
        key = (request.topic_id, request.partition)
        partition = process.manager.find(*key)
        committed = self.committed.get(key)
        if partition is None or committed is None or partition.replica.role is Role.STOPPED:
            return  # its disk failed in the same event, and what it held is not checked any more
        if (process.machine.number, key) in self._unreadable:
            return  # damaged: which of its records are committed is not known here
        if base_offset < partition.replica.log_start_offset:
            return
        if request.acks == ACKS_ALL and committed.at(base_offset) is None:
            raise ViolationError(
                "acknowledged is committed",
                f"{process.name} acknowledges the offset {base_offset}; committed is up to {committed.end_offset}",
                committed.name,
            )
        if self._world.cleaning_ms and committed.at(base_offset) is not None:
            if committed.values.get(base_offset) != decoded(message):
                text = f"{process.name} acknowledges {decoded(message)} at {base_offset}"
                raise ViolationError("a retry gets its own offset", text, committed.name)
            return
        try:
            stored = partition.log.read(base_offset, 1, partition.replica.log_end_offset)[0]
        except SparkBrokerError:
            return  # the disk failed meanwhile
        if decoded(stored.message) != decoded(message):
            raise ViolationError(
                "a retry gets its own offset",
                f"{process.name} acknowledges {decoded(message)} at {base_offset}; there is {decoded(stored.message)}",
                committed.name,
            )
        if stored.header.leader_epoch > request.leader_epoch >= 0:
            raise ViolationError(
                "appends name their epoch",
                f"{process.name} stored in epoch {stored.header.leader_epoch} what was sent to {request.leader_epoch}",
                committed.name,
            )

    def _name(self, key: Key) -> str:
        topic = self.image.topics.get(key[0])
        return f"{topic.name if topic else key[0]}-{key[1]}"

    def forget_dropped(self, process: BrokerProcess) -> None:
        """A process that hears of a move late drops its replica late, perhaps when it is to have one again, or dies."""
        for number, key in list(self.shadows):
            state = process.manager.image.partition(*key)
            if number != process.machine.number or state is None:
                continue
            if process.machine.broker_id in state.replicas and process.manager.find(*key) is not None:
                continue
            if not process.fs.is_directory(process.directory.path / self._name(key)):
                self.forget(process.machine, key)

    def forget_all(self, machine: SimulatedMachine) -> None:
        """The machine has another disk."""
        for number, key in list(self.shadows):
            if number == machine.number:
                self.forget(machine, key)

    def forget(self, machine: SimulatedMachine, key: Key) -> None:
        """The replica was deleted or quarantined: the next one in its place is another replica."""
        self.shadows.pop((machine.number, key), None)
        self._unreadable.pop((machine.number, key), None)


def _role(replica: Replica) -> tuple[object, ...]:
    """The same part of the replica's state as in a shadow's `state`."""
    return replica.log_start_offset, replica.role, replica.assignment.leader_epoch
