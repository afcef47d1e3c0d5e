"""Known bugs, put back into production code: each is a patch that the simulator has to find (docs/known-bugs.md).

Some faces of bugs are not here; `tests/unit/core` covers them. `ReplicaLog` drops an epoch past the log end (3) when it
opens, whatever the replica forgot to save. A follower that judges sequence numbers (21) agrees with its leader as long
as both have the same version; the unit tests let a leader of another version store what this version refuses. To count
a fetch of another epoch (7) would do no harm: the fetch proves by (epoch, offset) what the follower has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from spark_broker.broker.proposal_queue import ProposalQueue, Proposals
from spark_broker.broker.replica_fetcher import ReplicaFetcher
from spark_broker.broker.replica_log import ReplicaLog
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.controller import isr, registration
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.registration import Registration, RegistrationRules
from spark_broker.core import replica
from spark_broker.core.divergence import Diverging, FetchPosition, truncation_offset
from spark_broker.core.effects import Acknowledge, AdvanceLogStart, Effect, ProposeIsr
from spark_broker.core.epochs import EpochHistory
from spark_broker.core.events import AppendGrant, Fetched, RecoveredLog
from spark_broker.core.leadership import Leadership
from spark_broker.core.producers import ProducerStates, StoredBatch
from spark_broker.core.progress import FollowerProgress
from spark_broker.core.replica import Replica, Role
from spark_broker.driver.metadata_log import MetadataLog
from spark_broker.errors import DuplicateSequenceNumberError, IneligibleReplicaError
from spark_broker.protocol.messages import IsrMember, RegisterBrokerRequest
from spark_broker.storage.segment import Segment
from tests.sim.kinds import is_any

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Bug:
    """One entry (or a face of one). `quick`: found within a few hundred schedules, so it is part of `make test`.

    `shows`: whether a seed's schedule can show it. `rare`: random schedules show it so seldom that nobody hunts for it;
    it has a story of its own (`tests/sim/test_rare_bugs.py`).
    """

    number: str
    name: str
    what: str
    put_in: Callable[[Patch], None]
    quick: bool
    shows: Callable[[int], bool]
    rare: bool = False


BUGS: dict[str, Bug] = {}


def hunted() -> list[str]:
    """The names of those that random schedules are to find."""
    return [name for name, bug in sorted(BUGS.items()) if not bug.rare]


def bug(
    number: str, *, quick: bool = True, shows: Callable[[int], bool] = is_any, rare: bool = False
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Registers a patch under its function's name."""

    def register(put_in: Callable[[Patch], None]) -> Callable[[Patch], None]:
        name = put_in.__name__
        BUGS[name] = Bug(number, name, (put_in.__doc__ or "").strip(), put_in, quick, shows, rare)
        return put_in

    return register


@bug("1")
def truncate_by_own_high_watermark(patch: Patch) -> None:
    """KIP-101: a new epoch's follower goes back to what it knows to be committed."""
    follow = Replica._follow

    def buggy(self: Replica) -> list[Effect]:
        return [*follow(self), *self.truncate_to(self.high_watermark)]

    patch.setattr(Replica, "_follow", buggy)


@bug("2, 6")
def never_truncate(patch: Patch) -> None:
    """KIP-279, KAFKA-7164: a follower goes on from its log end, wherever the logs diverge."""

    def buggy(epochs: EpochHistory, log_end_offset: int, position: FetchPosition) -> Diverging | None:
        del epochs
        return None if position.fetch_offset <= log_end_offset else Diverging(-1, log_end_offset)

    patch.setattr(replica, "find_divergence", buggy)


@bug("2", quick=False)
def cut_at_the_leaders_end_only(patch: Patch) -> None:
    """KIP-279: the follower's own end of the epoch is not looked at."""

    def buggy(epochs: EpochHistory, log_end_offset: int, diverging: Diverging) -> int:
        del epochs
        return min(diverging.end_offset, log_end_offset)

    patch.setattr(replica, "truncation_offset", buggy)


@bug("2", quick=False)
def take_late_answers(patch: Patch) -> None:
    """A divergence that was found before the log was cut and filled again cuts it once more."""

    def buggy(self: Replica, answer: Fetched) -> bool:
        return self.role is Role.FOLLOWER and answer.leader_epoch == self.assignment.leader_epoch

    patch.setattr(Replica, "awaits", buggy)


@bug("3")
def leave_conflicting_epochs(patch: Patch) -> None:
    """KAFKA-10706: the history keeps what begins at or past the log end."""
    patch.setattr(EpochHistory, "truncate_to", lambda self, _: self)


@bug("4")
def trust_a_sparse_history(patch: Patch) -> None:
    """KAFKA-7897, 7959: a history that lacks epochs is not completed, and cuts below the high watermark."""

    def buggy(self: ReplicaLog) -> EpochHistory:
        return EpochHistory()

    def cut(self: Replica, diverging: Diverging) -> list[Effect]:
        offset = truncation_offset(self.epochs, self.log_end_offset, diverging)
        self.high_watermark = min(self.high_watermark, offset)
        return self.truncate_to(offset)

    patch.setattr(ReplicaLog, "_epochs", buggy)
    patch.setattr(Replica, "_truncate", cut)


@bug("5")
def lead_without_recording_the_epoch(patch: Patch) -> None:
    """A new leader serves before its epoch is in the history."""
    lead = Replica._lead

    def buggy(self: Replica, broker_epochs: Mapping[int, int], now_ms: int) -> list[Effect]:
        before = self.epochs
        lead(self, broker_epochs, now_ms)
        self.epochs = before
        return []

    patch.setattr(Replica, "_lead", buggy)


@bug("7")
def let_fenced_replicas_join(patch: Patch) -> None:
    """KAFKA-6880: a fenced replica comes back into the ISR by what it fetches, unfenced or not."""

    def buggy(image: MetadataImage, member: IsrMember) -> None:
        broker = image.brokers.get(member.broker_id)
        if broker is None or broker.epoch != member.broker_epoch:
            raise IneligibleReplicaError(f"broker {member.broker_id} is another one")

    patch.setattr(isr, "_check_joins", buggy)
    patch.setattr(ReplicaManager, "live_broker_epochs", ReplicaManager.broker_epochs)


@bug("8")
def take_appends_of_any_epoch(patch: Patch) -> None:
    """KIP-359: an append under a stale epoch is stored."""
    prepare = Replica.prepare_append

    def buggy(self, leader_epoch, *args, **kwargs):  # type: ignore[no-untyped-def]
        return prepare(self, -1, *args, **kwargs)

    patch.setattr(Replica, "prepare_append", buggy)


@bug("9", quick=False)
def let_older_incarnations_join(patch: Patch) -> None:
    """KIP-903, KAFKA-14139: what an earlier incarnation had fetched counts for its successor."""

    def update(self: Leadership, broker_epochs: Mapping[int, int], now_ms: int) -> None:
        earlier_followers = self.followers
        self.followers = {
            broker: earlier_followers.get(broker) or FollowerProgress(broker_epochs.get(broker, -1), now_ms)
            for broker in self._assignment.replicas
            if broker != self._me
        }
        for broker, progress in self.followers.items():
            progress.broker_epoch = broker_epochs.get(broker, -1)

    def check(image: MetadataImage, member: IsrMember) -> None:
        if not image.is_live(member.broker_id):
            raise IneligibleReplicaError(f"broker {member.broker_id} is not live")

    patch.setattr(Leadership, "_update_followers", update)
    patch.setattr(isr, "_check_joins", check)


@bug("10")
def count_the_current_isr_only(patch: Patch) -> None:
    """The high watermark does not wait for proposed members."""
    patch.setattr(Leadership, "maximal_isr", property(lambda self: frozenset(self._assignment.isr)))


@bug("10")
def commit_below_the_minimum(patch: Patch) -> None:
    """KIP-966: the high watermark moves however small the ISR is."""
    patch.setattr(Replica, "effective_min_isr", property(lambda self: 0))


@bug("10")
def acknowledge_before_the_commit(patch: Patch) -> None:
    """acks=all is answered when the leader alone has the batch."""

    def buggy(self, token, base_offset, next_offset, deadline_ms):  # type: ignore[no-untyped-def]
        return [Acknowledge(token, base_offset)]

    patch.setattr(Replica, "await_commit", buggy)


@bug("11", quick=False)
def join_without_the_epoch_start(patch: Patch) -> None:
    """A new leader's own high watermark is all that a joining follower must have."""
    grow = Leadership.grow

    def buggy(self: Leadership, follower: int, live: Mapping[int, int], high_watermark: int) -> list[ProposeIsr]:
        start, self.epoch_start_offset = self.epoch_start_offset, 0
        effects = grow(self, follower, live, high_watermark)
        self.epoch_start_offset = start
        return effects

    patch.setattr(Leadership, "grow", buggy)


@bug("12", quick=False)
def stay_in_sync_after_a_machine_crash(patch: Patch) -> None:
    """KIP-966: a replica that may have lost records with its machine keeps its place in ISR and ELR."""
    register = registration.register

    def buggy(image: MetadataImage, request: RegisterBrokerRequest, rules: RegistrationRules) -> Registration:
        taken_for = "process_crash" if request.start_kind == "machine_crash" else request.start_kind
        return register(image, _changed(request, start_kind=taken_for), rules)

    patch.setattr("spark_broker.controller.controller.register", buggy)


def _changed(request: RegisterBrokerRequest, **changes: object) -> RegisterBrokerRequest:
    values = {name: getattr(request, name) for name in request.__struct_fields__}
    return RegisterBrokerRequest(**{**values, **changes})


@bug("13")
def serve_past_the_high_watermark(patch: Patch) -> None:
    """A consumer is handed what is not committed."""

    def buggy(self: Replica, leader_epoch: int, offset: int, *, read_committed: bool = False) -> int:
        del offset, read_committed
        self.check_leader(leader_epoch)
        return self.log_end_offset

    patch.setattr(Replica, "check_read", buggy)


@bug("14")
def show_a_new_leaders_high_watermark_at_once(patch: Patch) -> None:
    """KIP-207: the latest offset falls."""
    patch.setattr(Replica, "latest_offset", lambda self, _, **__: self.high_watermark)


@bug("15", quick=False)
def move_the_log_start_alone(patch: Patch) -> None:
    """KAFKA-9491: nothing lifts the high watermark to the log start, neither when that moves nor at the next start."""
    init = Replica.__init__

    def opened(self: Replica, me: int, log: RecoveredLog, **settings: Any) -> None:
        init(self, me, log, **settings)
        self.high_watermark = min(log.high_watermark, log.log_end_offset)

    def advanced(self: Replica, offset: int) -> list[Effect]:
        if offset <= self.log_start_offset:
            return []
        self.log_start_offset = offset
        self.producers.start_at(offset)
        return [AdvanceLogStart(offset), *self._set_epochs(self.epochs.start_at(offset))]

    patch.setattr(Replica, "__init__", opened)
    patch.setattr(Replica, "advance_log_start", advanced)


@bug("18")
def take_an_existing_file_for_ours(patch: Patch) -> None:
    """Two controllers write the same number of the metadata log, and both go on."""
    patch.setattr(MetadataLog, "_check_ours", lambda self, name, data: None)


@bug("19")
def keep_producers_over_a_cut(patch: Patch) -> None:
    """KAFKA-5435: the state is not rebuilt after truncation."""
    rebuilt = Replica.truncated

    def buggy(self: Replica, producers: ProducerStates, log_end_offset: int) -> list[Effect]:
        del producers
        return rebuilt(self, self.producers, log_end_offset)

    patch.setattr(Replica, "truncated", buggy)


@bug("20", quick=False)
def forget_producers_of_deleted_records(patch: Patch) -> None:
    """KIP-360: retention erases the state of producers whose records it removes."""
    start_at = ProducerStates.start_at

    def buggy(self: ProducerStates, log_start_offset: int) -> None:
        start_at(self, log_start_offset)
        for producer_id, entry in self.entries():
            if entry.batches and entry.batches[-1].base_offset < log_start_offset:
                del self._entries[producer_id]

    patch.setattr(ProducerStates, "start_at", buggy)


@bug("22")
def store_a_retry_again(patch: Patch) -> None:
    """A batch that is in the log already is stored once more."""
    prepare = Replica.prepare_append

    def buggy(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        granted = prepare(self, *args, **kwargs)
        if isinstance(granted, StoredBatch):
            return AppendGrant(self.log_end_offset, self.assignment.leader_epoch)
        return granted

    patch.setattr(Replica, "prepare_append", buggy)


@bug("22")
def forget_offsets_of_retries(patch: Patch) -> None:
    """A retry is recognised, and nobody knows its offset any more."""
    check = ProducerStates.check

    def buggy(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        stored = check(self, *args, **kwargs)
        if stored is not None:
            raise DuplicateSequenceNumberError("stored before")
        return stored

    patch.setattr(ProducerStates, "check", buggy)


@bug("25")
def stamp_batches_with_their_own_time(patch: Patch) -> None:
    """Where clocks differ, the times of batches fall, and a lookup by time that halves the log misses records."""
    patch.setattr(ReplicaLog, "max_timestamp_us", property(lambda self: -1))


@bug("")
def pull_no_more_after_a_session_that_failed(patch: Patch) -> None:
    """A follower's pause after a fetch session that failed never ends."""
    patch.setattr(ReplicaFetcher, "tick", lambda self: None)


@bug("")
def lose_proposals_whose_answer_is_lost(patch: Patch) -> None:
    """An ISR proposal is not repeated when nobody knows what became of it."""

    def buggy(self: ProposalQueue, proposals: Proposals) -> None:
        del proposals
        self.settled()

    patch.setattr(ProposalQueue, "put_back", buggy)


@bug("27", quick=False)
def go_on_after_a_failed_fsync(patch: Patch) -> None:
    """An error of fsync is taken for success."""
    sync = Segment.sync

    def buggy(self: Segment) -> None:
        try:
            sync(self)
        except OSError:
            return

    patch.setattr(Segment, "sync", buggy)
