"""Simulated members of consumer groups: they resume from what their group has committed, read, and commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from spark_broker.client.consumer_effects import CommitOffsets, Effect, FetchCommitted
from spark_broker.client.coordinator import addressed, coordinator_of
from spark_broker.client.group_offsets import from_messages, to_messages
from spark_broker.errors import CoordinatorNotAvailableError, SparkBrokerError
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, OffsetAndMetadata, TopicPartition
from spark_broker.protocol.messages import (
    CallRequest,
    EmptyResponse,
    OffsetCommitRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from spark_broker.testing.simulation.consumer import CONFIG, Key, SimConsumer
from spark_broker.testing.simulation.scheduler import Timer
from spark_broker.testing.simulation.trace import TraceKind
from spark_broker.testing.simulation.violation import ViolationError

if TYPE_CHECKING:
    from spark_broker.testing.simulation.groups import Groups
    from spark_broker.testing.simulation.machine import SimulatedMachine
    from spark_broker.testing.simulation.world import World

COORDINATOR_TIMEOUT_MS = 700
RETRY_MS = 50.0


class SimGroupMember(SimConsumer):
    """The only member of its group, in one life."""

    def __init__(self, world: World, groups: Groups, group: str, life: int) -> None:
        super().__init__(world, f"{group}#{life}", replace(CONFIG, group_id=group))
        self.group = group
        self._groups = groups
        self._commit_timer = Timer(world.scheduler, self, "commit", self._commit)
        self._commit_due = False
        self._commit_generations: dict[TopicPartition, int] | None = None  # of the commit that is under way
        self._settled = False  # it has found its first positions
        self._leaving = False
        self._last_commit = False  # the last commit before it leaves is under way
        self._coordinator_epoch = -1
        self._commits = 0
        self._leader_epochs: dict[TopicPartition, int] = {}
        self._seen_at_end = False

    def start(self) -> None:
        """Join, with the name of this life."""
        self.world.history.opened(self.name, group=self.group)
        super().start()

    @property
    def committed(self) -> dict[Key, OffsetAndMetadata]:
        """What is known to be committed."""
        return {self.key(self.machine.partitions[tp]): offset for tp, offset in self.machine.committed.items()}

    def kept_position(self, key: Key) -> int:
        position = self.position_of(key)
        offset = None if position is None else self.machine.committed.get(position.tp)
        return -1 if offset is None else offset.offset

    def refreshed(self) -> None:
        """The member may be killed when it sees a new leader. Its successor is then the first to ask that leader."""
        moved = [tp for tp in self.machine.partitions if self._has_moved(tp)]
        draw, chance = self._groups.draw, self._groups.rng.random() if moved else 1.0
        if chance < draw.restart_share and not self._groups.stopped:
            self.quit("is killed as a leader changes")
        else:
            super().refreshed()

    def _has_moved(self, tp: TopicPartition) -> bool:
        """Whether the partition has another leader than at the last look."""
        state = self.machine.view.partition(tp.topic, tp.partition)
        epoch = -1 if state is None else state.leader_epoch
        before, self._leader_epochs[tp] = self._leader_epochs.get(tp, epoch), epoch
        return epoch > before

    def _later(self, mean_ms: float, label: str, action: Callable[[], None]) -> None:
        self.world.scheduler.after(mean_ms * (0.5 + self._groups.rng.random()), self, label, action)

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case FetchCommitted(generations):
                partitions = [(tp.topic, tp.partition) for tp in generations]
                request = OffsetFetchRequest(self.group, partitions, require_stable=True)
                self._ask_coordinator(request, partial(self._committed_came, effect))
            case CommitOffsets(offsets):
                self._commits += 1
                commit = OffsetCommitRequest(
                    self.group, to_messages(offsets), committer=self.name, sequence=self._commits
                )
                self._ask_coordinator(commit, partial(self._committed, effect))
            case _:
                super().carry_out(effect)

    def _ask_coordinator(
        self, request: OffsetCommitRequest | OffsetFetchRequest, answered: Callable[[object], None]
    ) -> None:
        """Ask the coordinator; `answered` is called with its answer or an error."""
        epoch = ask_coordinator(self, self.group, request, answered)
        if epoch is None:
            return
        if self._coordinator_epoch not in (-1, epoch):
            self.world.trace.count("coordinators changed")
        self._coordinator_epoch = epoch

    def _committed_came(self, asked: FetchCommitted, answer: object) -> None:
        if not isinstance(answer, OffsetFetchResponse):
            self.round_failed(error_of(answer))
            return
        committed = from_messages(answer.offsets)
        for tp in asked.generations:
            offset = committed.get(tp)
            self.world.history.offsets_fetched(self.group, tp, None if offset is None else offset.offset)
            if offset is not None:
                self.world.trace.count("positions resumed")
        self.machine.committed_came(asked, committed, self.now_ms)
        self.positioned(asked.generations)
        if not self._settled:
            self._settled = True
            self._later(self._groups.draw.life_ms, "leave", self._leave)
        self.advance()

    def positioned(self, generations: Mapping[TopicPartition, int]) -> None:
        super().positioned(generations)
        for tp in generations:
            if (position := self.machine.partitions.get(tp)) is not None:
                position.chosen = True  # As if its user had sought to where it is: then a commit stores it.
        self._commit_soon()

    def handed_out(self) -> None:
        self._commit_soon()

    def noticed(self) -> None:
        """The member may commit the position, and be killed before poll raises the error. Then its successor must get
        the error.
        """
        self._commit_soon()

    def _ends_unnotified(self) -> bool:
        """Whether the member ends before poll raises the error. This happens at most once in each group.

        It may also happen at the end of a schedule, where most elections of replicas that lack records happen.
        """
        if self.unnotified is None or self.group in self._groups.ended_unnotified:
            return False
        self._groups.ended_unnotified.add(self.group)
        return self._groups.rng.random() < self._groups.draw.restart_share

    def _commit_soon(self) -> None:
        if not self._commit_due:
            self._commit_due = True
            self._commit_timer.set(self._groups.draw.commit_ms * (0.5 + self._groups.rng.random()))

    def _commit(self) -> None:
        """Commit the positions that have moved, one commit after the other."""
        self._commit_due = False
        if self._commit_generations is not None:
            self._commit_soon()
            return
        offsets = self.machine.uncommitted_positions()
        if not offsets:
            if self._leaving:
                self.quit("leaves")
            elif self._ends_unnotified():
                self.quit("is killed before it is notified")
            return
        self._commit_generations = {tp: self.machine.partitions[tp].generation for tp in offsets}
        self._last_commit = self._leaving
        self.machine.commit_later(offsets, self.now_ms + COORDINATOR_TIMEOUT_MS)
        self.advance()

    def _committed(self, commit: CommitOffsets, answer: object) -> None:
        generations, self._commit_generations = self._commit_generations or {}, None
        if isinstance(answer, EmptyResponse):
            self.world.trace.count("offsets committed")
            for tp, offset in commit.offsets.items():
                if self.machine.partitions[tp].generation == generations[tp]:  # else it was notified, and this is gone
                    self.world.history.offsets_committed(self.group, tp, offset.offset)
            self.machine.commit_ended(commit)
        else:
            # Committed or not, the next commit has these positions or later ones.
            self.world.note(self.name, TraceKind.CLIENT, f"a commit failed: {answer}")
            self.machine.commit_ended(commit, error_of(answer))
            self._commit_soon()
        if self._last_commit:
            self.quit("leaves")
        elif self._leaving:
            self._commit()
        elif self._ends_unnotified():
            self.quit("is killed before it is notified")
        elif isinstance(answer, EmptyResponse) and self._groups.committed_past_the_stranded(
            self.group, self._coordinator_epoch
        ):
            self.quit("is killed while a coordinator is stranded", self._groups.take_stranded())
        else:
            self.advance()

    def _leave(self) -> None:
        """Crash, or commit once more and leave. Another member takes over."""
        if self._groups.stopped:
            return
        if self._groups.rng.random() < self._groups.draw.crash_share:
            self.quit("is killed")
            return
        self._leaving = True
        if self._commit_generations is None:
            self._commit()

    def quit(self, how: str, bootstrap: SimulatedMachine | None = None) -> None:
        """The member's process ends. Its successor asks `bootstrap` for metadata first."""
        positions = self.machine.positions_to_commit()
        self.world.note(self.name, TraceKind.CLIENT, f"{how} at {positions}, having committed {self.machine.committed}")
        self.world.end_client(self)
        self._groups.replace(self, bootstrap)

    def missing(self) -> str:
        """Positions that are not committed at the end, or were not fetched again. Empty when everything is in its
        place.
        """
        if not self.alive:
            return f"{self.group} has no member"
        if self.machine.uncommitted_positions():
            positions = self.machine.positions_to_commit()
            return f"{self} has committed {self.machine.committed} and is at {positions}"
        if not self._seen_at_end:
            self._ask_coordinator(OffsetFetchRequest(self.group), self._see_at_end)
            return f"{self} has not seen what it has committed"
        return ""

    def _see_at_end(self, answer: object) -> None:
        if not isinstance(answer, OffsetFetchResponse):
            return
        committed = from_messages(answer.offsets)
        for tp, offset in self.machine.committed.items():
            seen = committed.get(tp)
            self.world.history.offsets_fetched(self.group, tp, None if seen is None else seen.offset)
            if seen != offset:
                raise ViolationError("what is committed stays", f"{self} committed {offset}, and finds {seen}", str(tp))
        self._seen_at_end = True


def ask_coordinator(
    consumer: SimConsumer,
    group: str,
    request: CallRequest,
    answered: Callable[[object], None],
    timeout_ms: float = COORDINATOR_TIMEOUT_MS,
) -> int | None:
    """Ask the group's coordinator; `answered` is called with its answer or an error. The leader epoch that it has, as
    far as the consumer knows; None: none is known.
    """
    world = consumer.world
    try:
        broker, state = coordinator_of(consumer.machine.view, CONSUMER_OFFSETS_TOPIC, group)
    except CoordinatorNotAvailableError as error:
        world.scheduler.after(RETRY_MS, consumer, "no coordinator", partial(answered, error))
        return None
    world.network.call(
        consumer,
        broker.host,
        (broker.host, broker.port),
        addressed(request, state),
        timeout_ms=timeout_ms,
        on_answer=answered,
        on_error=answered,
        ends_with_caller=True,  # nothing fences the predecessor of a consumer without membership, in Kafka neither
    )
    return state.leader_epoch


def error_of(answer: object) -> SparkBrokerError:
    unexpected = CoordinatorNotAvailableError(f"the coordinator answered with {type(answer).__name__}")
    return answer if isinstance(answer, SparkBrokerError) else unexpected
