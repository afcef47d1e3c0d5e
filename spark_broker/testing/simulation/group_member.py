"""Simulated members of consumer groups: they resume from what their group has committed, read, and commit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from spark_broker.client.assignment import PartitionState, Start
from spark_broker.errors import CoordinatorNotAvailableError, SparkBrokerError
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.messages import CommittedOffset, CommittedOffsets, Empty, OffsetCommit, OffsetFetch
from spark_broker.protocol.murmur2 import group_partition
from spark_broker.testing.simulation.consumer import Key, SimConsumer
from spark_broker.testing.simulation.network import Address
from spark_broker.testing.simulation.scheduler import Timer
from spark_broker.testing.simulation.trace import Kind
from spark_broker.testing.simulation.violation import ViolationError

if TYPE_CHECKING:
    from spark_broker.testing.simulation.groups import Groups
    from spark_broker.testing.simulation.world import World

CALL_TIMEOUT_MS = 700
RETRY_MS = 50.0

Place = tuple[int, int]
"""Of a partition: the next offset to read, and the leader epoch of the record before it."""


class SimGroupMember(SimConsumer):
    """The only member of its group, in one life. `committed`: what is known to be committed."""

    def __init__(self, world: World, groups: Groups, group: str, life: int) -> None:
        super().__init__(world, f"{group}#{life}")
        self.group = group
        self.committed: dict[Key, Place] = {}
        self._groups = groups
        self._looking = False  # for committed offsets, now or soon
        self._commit_timer = Timer(world.scheduler, self, "commit", self._commit)
        self._commit_due = False
        self._committing = False
        self._settled = False  # it has found its first positions
        self._leaving = False
        self._last_commit = False  # on its way, before it leaves
        self._coordinator_epoch = -1
        self._leader_epochs: dict[Key, int] = {}
        self._seen_at_end = False

    def start(self) -> None:
        """Join, with the name of this life."""
        self.world.history.opened(self.name, group=self.group)
        super().start()

    def refreshed(self) -> bool:
        """Perhaps it does not live to see a new leader: its successor is the first to ask there."""
        moved = [key for key in self.states if self._has_moved(key)]
        draw, chance = self._groups.draw, self._groups.rng.random() if moved else 1.0
        if chance < draw.restart_share and not self._groups.stopped:
            self._quit("is killed as a leader changes")
            return False
        return super().refreshed()

    def _has_moved(self, key: Key) -> bool:
        """Whether the partition has another leader than at the last look."""
        state = self.image.partition(*key)
        epoch = -1 if state is None else state.leader_epoch
        before, self._leader_epochs[key] = self._leader_epochs.get(key, epoch), epoch
        return epoch > before

    def kept_position(self, key: Key) -> int:
        return self.committed.get(key, (-1, -1))[0]

    def _later(self, mean_ms: float, label: str, action: Callable[[], None]) -> None:
        self.world.scheduler.after(mean_ms * (0.5 + self._groups.rng.random()), self, label, action)

    # ---- the coordinator ---------------------------------------------------------------------------------------

    def _ask_coordinator(self, request: OffsetCommit | OffsetFetch, answered: Callable[[object], None]) -> None:
        """`answered` with the coordinator's answer, or an error."""
        address = self._coordinator()
        if address is None:
            self.want_metadata()
            error = CoordinatorNotAvailableError("its partition has no leader")
            self.world.scheduler.after(RETRY_MS, self, "no coordinator", partial(answered, error))
            return
        self.world.network.call(
            self,
            address[0],
            address,
            request,
            timeout_ms=CALL_TIMEOUT_MS,
            on_answer=answered,
            on_error=partial(self._failed, answered),
            taken_back=True,
        )

    def _coordinator(self) -> Address | None:
        topic = self.image.topic(CONSUMER_OFFSETS_TOPIC)
        if topic is None:
            return None
        found = self.leader(topic.topic_id, group_partition(self.group, len(topic.partitions)))
        if found is None:
            return None
        _, leader_epoch, address = found
        if self._coordinator_epoch not in (-1, leader_epoch):
            self.world.trace.count("coordinators changed")
        self._coordinator_epoch = leader_epoch
        return address

    def _failed(self, answered: Callable[[object], None], error: SparkBrokerError) -> None:
        self.want_metadata()
        answered(error)

    # ---- resuming ----------------------------------------------------------------------------------------------

    def begin(self, key: Key, state: PartitionState) -> None:
        """Where the group has got to is to be asked first."""
        del key
        state.find_start(Start.COMMITTED)
        if not self._looking:
            self._looking = True
            self.world.scheduler.after(0, self, "look for committed offsets", self._look)

    def _look(self) -> None:
        wanted = {key: state for key, state in self.states.items() if state.start is Start.COMMITTED}
        partitions = [(state.tp.topic, state.tp.partition) for state in wanted.values()]
        self._ask_coordinator(OffsetFetch(self.group, partitions), partial(self._found, wanted))

    def _found(self, wanted: dict[Key, PartitionState], answer: object) -> None:
        if not isinstance(answer, CommittedOffsets):
            self._later(RETRY_MS, "look again", self._look)
            return
        found = {(one.topic, one.partition): one for one in answer.offsets}
        for key, state in wanted.items():
            self._resume(key, state, found.get((state.tp.topic, state.tp.partition)))
        if not self._settled:
            self._settled = True
            self._later(self._groups.draw.life_ms, "leave", self._leave)
        self._looking = any(state.start is Start.COMMITTED for state in self.states.values())
        if self._looking:  # partitions that have come meanwhile
            self._look()

    def _resume(self, key: Key, state: PartitionState, found: CommittedOffset | None) -> None:
        self.world.history.offsets_fetched(self.group, state.tp, None if found is None else found.offset)
        if found is None:
            self.move(state, 0)
            self._commit_soon()
            return
        self.world.trace.count("positions resumed")
        self.committed[key] = (found.offset, found.leader_epoch)
        self.move(state, found.offset, found.leader_epoch)

    # ---- commits -----------------------------------------------------------------------------------------------

    def handed_out(self, key: Key) -> None:
        del key
        self._commit_soon()

    def _commit_soon(self) -> None:
        if not self._commit_due:
            self._commit_due = True
            self._commit_timer.set(self._groups.draw.commit_ms * (0.5 + self._groups.rng.random()))

    def _commit(self) -> None:
        """Commit the positions that have moved, one commit after the other."""
        self._commit_due = False
        if self._committing:
            self._commit_soon()
            return
        places = {key: place for key, place in self._places().items() if self.committed.get(key) != place}
        if not places:
            if self._leaving:
                self._quit("leaves")
            return
        self._committing = True
        for key in places:
            self.committed.pop(key, None)  # unknown until this one is answered
        self._last_commit = self._leaving
        tps = {key: self.states[key].tp for key in places}
        offsets = [CommittedOffset(tps[key].topic, tps[key].partition, *place) for key, place in places.items()]
        generations = {key: self.states[key].generation for key in places}
        self._ask_coordinator(OffsetCommit(self.group, offsets), partial(self._committed, places, generations))

    def _places(self) -> dict[Key, Place]:
        return {key: (state.position, state.last_epoch) for key, state in self.states.items() if state.has_position}

    def _committed(self, places: dict[Key, Place], generations: dict[Key, int], answer: object) -> None:
        self._committing = False
        if isinstance(answer, Empty):
            self.world.trace.count("offsets committed")
            self.committed.update(places)
            for key, (offset, _) in places.items():
                if self.states[key].generation == generations[key]:  # else it was told meanwhile that this is gone
                    self.world.history.offsets_committed(self.group, self.states[key].tp, offset)
        else:
            # Committed or not: the next commit is of these positions or of later ones.
            self.world.note(self.name, Kind.CLIENT, f"a commit failed: {answer}")
            self._commit_soon()
        if self._last_commit:
            self._quit("leaves")
        elif self._leaving:
            self._commit()

    # ---- the end -----------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Crash, or commit once more and go. Another member takes over."""
        if self._groups.stopped:
            return
        if self._groups.rng.random() < self._groups.draw.crash_share:
            self._quit("is killed")
            return
        self._leaving = True
        if not self._committing:
            self._commit()

    def _quit(self, how: str) -> None:
        self.world.note(self.name, Kind.CLIENT, f"{how} at {self._places()}, having committed {self.committed}")
        self.world.end_client(self)
        self._groups.replace(self)

    def missing(self) -> str:
        """At the end: what is not committed, or was not asked for again; empty when all is as it should be."""
        if not self.alive:
            return f"{self.group} has no member"
        committed = {key: offset for key, (offset, _) in self.committed.items()}
        if committed != {key: state.position for key, state in self.states.items()}:
            return f"{self} has committed {self.committed} and is at {self._places()}"
        if not self._seen_at_end:
            self._ask_coordinator(OffsetFetch(self.group), self._see_at_end)
            return f"{self} has not seen what it has committed"
        return ""

    def _see_at_end(self, answer: object) -> None:
        if not isinstance(answer, CommittedOffsets):
            return
        found = {(one.topic, one.partition): (one.offset, one.leader_epoch) for one in answer.offsets}
        for key, place in self.committed.items():
            tp = self.states[key].tp
            seen = found.get((tp.topic, tp.partition))
            self.world.history.offsets_fetched(self.group, tp, None if seen is None else seen[0])
            if seen != place:
                raise ViolationError("what is committed stays", f"{self} committed {place}, and finds {seen}", str(tp))
        self._seen_at_end = True
