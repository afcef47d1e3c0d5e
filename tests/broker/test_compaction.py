"""Compaction of one replica: what stays, what goes, and what clients and restarts make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spark_broker.broker.append import check_keys
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.replica_log import ReplicaLog, from_wire
from spark_broker.controller.topic_history import TopicHistory
from spark_broker.core.batch import batch_info
from spark_broker.core.compaction import NEVER_CLEANED, Cleaned
from spark_broker.core.producers import ProducerStates
from spark_broker.core.replica import LeaderAndIsr
from spark_broker.errors import DamagedLogError, InvalidRecordError, PolicyViolationError
from spark_broker.protocol.frame import CONTROL, ROW_OFFSETS, TRANSACTIONAL
from spark_broker.storage.log_state import LOG_STATE_FILE, LogState, read_log_state, write_log_state
from spark_broker.storage.segment_swap import COMPACTION_FILE
from spark_broker.storage.start_kind import StartKind
from tests.broker.compacted_partition import DAY_MS, CompactedPartition
from tests.broker.rig import FAR_FUTURE_MS, batch
from tests.storage.logs import sim_directory


@pytest.fixture
def lone(tmp_path: Path) -> CompactedPartition:
    return CompactedPartition(tmp_path / "t-0")


def test_the_last_record_of_each_key_stays_at_its_offset(lone: CompactedPartition) -> None:
    for version in range(10):
        lone.put(*((b"key-%d" % key, b"%d" % version) for key in range(5)))
    last = lone.put((b"key-0", b"newest"))
    lone.roll()
    assert lone.compact() == 1
    lone.check()
    assert [row for row in lone.rows() if not row[1].startswith(b"filler")] == [
        (46, b"key-1", b"9"),
        (47, b"key-2", b"9"),
        (48, b"key-3", b"9"),
        (49, b"key-4", b"9"),
        (last, b"key-0", b"newest"),
    ]


def test_nothing_is_compacted_while_the_table_lacks_what_was_tiered(tmp_path: Path) -> None:
    """The records that a pass would remove are in the table only, and nobody finds it there."""
    lone = CompactedPartition(tmp_path / "t-0", {"delta.path": "/lake"})
    for version in range(10):
        lone.put((b"k", b"%d" % version))
    lone.roll()
    before, assignment = lone.rows(), LeaderAndIsr(0, lone.leader_epoch, lone.leader_epoch, (0,), (0,))
    tiered = TopicHistory(starts=(0,), ends=(len(before),))
    lone.partition.assign(assignment, replace(lone.topic, history=replace(tiered, missing=True)), {0: 1})
    assert lone.compact() == 0
    assert lone.rows() == before
    lone.partition.assign(assignment, replace(lone.topic, history=tiered), {0: 1})
    assert lone.compact() == 1
    lone.check()


def test_the_active_segment_is_left_as_it_is(lone: CompactedPartition) -> None:
    for version in range(2):
        lone.put((b"k", b"%d" % version))
    assert lone.compact() == 0
    assert len(lone.rows()) == 2


def test_what_was_removed_is_one_gap(lone: CompactedPartition) -> None:
    for version in range(40):
        lone.put((b"k", b"%d" % version))
    lone.roll()
    lone.compact()
    gap, *others = lone.headers()
    assert (gap.base_offset, gap.row_count, gap.producer_id) == (0, 0, -1)
    assert gap.attributes & ROW_OFFSETS
    assert others[0].base_offset == gap.next_offset == 39
    lone.check()


def test_small_segments_become_one(lone: CompactedPartition) -> None:
    for number in range(6):
        lone.put((b"k", b"%d" % number))
        lone.roll(filler=0)
    before = lone.segments()
    lone.compact()
    lone.check()
    assert len(lone.segments()) == 3  # the compacted one, one that is large and stays as it is, the active one
    assert set(lone.segments()) <= set(before)


def test_another_pass_changes_nothing(lone: CompactedPartition) -> None:
    for version in range(40):
        lone.put((b"k-%d" % (version % 7), b"%d" % version))
    lone.roll()
    assert lone.compact() == 1
    files = {path.name: path.stat().st_ino for path in lone.directory.glob("*.arrow")}
    assert lone.compact() == 0
    assert files == {path.name: path.stat().st_ino for path in lone.directory.glob("*.arrow")}


def test_a_segment_in_which_all_stays_is_not_written_again(tmp_path: Path) -> None:
    lone = CompactedPartition(tmp_path / "t-0", {"segment.bytes": "6000"})
    for key in range(3):
        lone.put((b"once-%d" % key, bytes(1500)))
    first = next(lone.directory.glob("*.arrow")).stat().st_ino
    for _ in range(8):
        lone.put((b"often", bytes(1500)))
    lone.compact()
    lone.check()
    assert next(iter(sorted(lone.directory.glob("*.arrow")))).stat().st_ino == first


def test_a_tombstone_stays_for_delete_retention_after_what_it_deletes_is_gone(lone: CompactedPartition) -> None:
    lone.put((b"k", b"v"))
    tombstone = lone.put((b"k", None))
    lone.roll()
    lone.clock.ahead_ms = 10 * DAY_MS  # the time counts from the pass, not from the append
    lone.compact()
    lone.check()
    assert (tombstone, b"k", None) in lone.consumed()
    lone.clock.ahead_ms += DAY_MS - 60_000
    assert lone.compact() == 0
    lone.clock.ahead_ms += 120_000
    assert lone.compact() == 1
    lone.check(deletions_may_be_gone=True)
    assert b"k" not in {key for _, key, _ in lone.consumed()}
    assert lone.partition.replica.purge_offset > tombstone
    assert lone.compact() == 0


def test_a_broker_without_a_lease_removes_no_tombstone(lone: CompactedPartition) -> None:
    """Its clock may be wrong: that is why the controller fences it."""
    lone.put((b"k", b"v"))
    tombstone = lone.put((b"k", None))
    lone.roll()
    lone.compact()
    lone.clock.ahead_ms = 2 * DAY_MS
    lone.lease.drop()
    assert lone.compact() == 0
    lone.clock.ahead_ms = 0
    lone.lease.extend(SYSTEM_CLOCK.boottime_ms(), FAR_FUTURE_MS)
    assert (tombstone, b"k", None) in lone.consumed()
    lone.clock.ahead_ms = 2 * DAY_MS
    assert lone.compact() == 1


def test_a_clock_that_was_ahead_once_does_not_end_compaction(lone: CompactedPartition) -> None:
    """Times of appends never fall along a log: later ones are in the future, too."""
    lone.clock.ahead_ms = 365 * DAY_MS
    lone.put((b"k", b"0"))
    lone.clock.ahead_ms = 0
    for version in range(10):
        lone.put((b"k", b"%d" % version))
    lone.roll()
    assert lone.compact() == 1
    lone.check()


def test_nothing_is_said_to_be_purged_where_there_was_nothing_to_purge(lone: CompactedPartition) -> None:
    lone.put((b"k", b"1"))
    lone.put((b"k", b"2"))
    lone.roll()
    lone.compact()
    lone.clock.ahead_ms = 2 * DAY_MS
    assert lone.compact() == 1
    assert lone.partition.replica.purge_offset == 0
    assert lone.compact() == 0


def test_min_compaction_lag_keeps_young_segments(tmp_path: Path) -> None:
    lone = CompactedPartition(tmp_path / "t-0", {"min.compaction.lag.ms": "60000"})
    lone.put((b"k", b"1"))
    lone.put((b"k", b"2"))
    lone.roll()
    assert lone.compact() == 0
    lone.clock.ahead_ms = 61_000
    assert lone.compact() == 1
    lone.check()


def test_a_log_with_little_that_is_new_waits_for_its_share_or_its_age(tmp_path: Path) -> None:
    lone = CompactedPartition(
        tmp_path / "t-0", {"min.cleanable.dirty.ratio": "0.5", "max.compaction.lag.ms": "3600000"}
    )
    for key in range(20):
        lone.put((b"k-%d" % key, bytes(1500)))
    lone.compact()
    lone.put((b"k-0", bytes(1500)))
    lone.roll()
    assert lone.compact() == 0
    lone.clock.ahead_ms = 3_700_000
    assert lone.compact() == 1
    lone.check()


def test_more_keys_than_fit_into_memory_take_several_passes(lone: CompactedPartition) -> None:
    for number in range(400):
        lone.put((b"key-%04d" % (number % 150), b"%d" % number))
    lone.roll()
    lone.limits = lone.limits.__class__(1024, 0)
    assert lone.compact() > 1
    lone.check()
    assert lone.partition.log.cleaned.clean_to == lone.segments()[-1]


def test_aborted_records_go_and_supersede_nothing(lone: CompactedPartition) -> None:
    kept = lone.put((b"k", b"kept"))
    aborted = lone.put((b"k", b"aborted"), pid=7, txn=True)
    lone.finish(7, 1, committed=False, offsets=[aborted])
    lone.roll()
    lone.compact()
    lone.check()
    assert (kept, b"k", b"kept") in lone.consumed()
    assert b"aborted" not in {value for _, _, value in lone.rows()}


def test_records_of_an_open_transaction_are_left_alone(lone: CompactedPartition) -> None:
    lone.put((b"k", b"1"))
    opened = lone.put((b"k", b"2"), pid=7, txn=True)
    lone.put((b"k", b"3"))
    lone.roll()
    lone.compact()
    lone.check()
    assert [value for _, key, value in lone.rows() if key == b"k"] == [b"1", b"2", b"3"]
    lone.finish(7, 1, committed=True, offsets=[opened])
    lone.roll()
    lone.compact()
    lone.check()
    assert [value for _, key, value in lone.rows() if key == b"k"] == [b"3"]


def test_a_decided_transaction_needs_its_marker_no_more(lone: CompactedPartition) -> None:
    offset = lone.put((b"k", b"v"), pid=7, txn=True)
    marker = lone.finish(7, 1, committed=True, offsets=[offset])
    later = lone.put((b"other", b"v"), pid=7, epoch=1, txn=True)
    lone.finish(7, 2, committed=True, offsets=[later])
    lone.roll()
    lone.compact()
    assert marker in {header.base_offset for header in lone.headers() if header.attributes & CONTROL}
    lone.clock.ahead_ms = 2 * DAY_MS
    lone.roll(filler=1)
    lone.compact()
    lone.check()
    headers = lone.headers()
    assert marker not in {header.base_offset for header in headers if header.attributes & CONTROL}
    assert not any(h.attributes & TRANSACTIONAL and not h.attributes & CONTROL for h in headers[:-4])
    for start in StartKind:
        lone.reopen(start, high_watermark=0)
        lone.check()
        assert lone.last_stable_offset() == lone.partition.replica.log_end_offset


@pytest.mark.parametrize("start", StartKind)
def test_a_retry_gets_its_first_offset_though_its_records_are_gone(lone: CompactedPartition, start: StartKind) -> None:
    offsets = [lone.put((b"k", b"%d" % n), pid=7, sequence=n) for n in range(8)]
    lone.put((b"k", b"newest"))
    lone.roll()
    lone.compact()
    lone.check()
    places = [header for header in lone.headers() if header.producer_id == 7]
    assert [(header.base_sequence, header.row_count) for header in places] == [(n, 0) for n in range(3, 8)]
    lone.reopen(start)
    for sequence in range(3, 8):
        assert lone.put((b"k", b"%d" % sequence), pid=7, sequence=sequence) == offsets[sequence]
    assert lone.put((b"k", b"next"), pid=7, sequence=8) == lone.partition.replica.log_end_offset - 1


@pytest.mark.parametrize("at_a_snapshot", [True, False])
def test_a_log_start_within_a_transaction_outlives_its_marker(tmp_path: Path, at_a_snapshot: bool) -> None:
    """The state at the log start has the transaction open, and its producer is forgotten before the marker is purged.

    A follower that copies the log begins with that state. It must not take the transaction for open for ever.
    """
    lone = CompactedPartition(tmp_path / "t-0", {"cleanup.policy": "compact,delete"})
    first = lone.put((b"k", bytes(2000)), pid=7, txn=True)
    second = lone.put((b"k", bytes(2000)), pid=7, sequence=1, txn=True)
    lone.put((b"other", bytes(2000)))
    assert second in lone.snapshots()
    lone.finish(7, 1, committed=True, offsets=[first, second])
    lone.put((b"deleted", b"v"))
    lone.put((b"deleted", None))
    lone.roll()
    if not at_a_snapshot:
        lone.partition.advance_log_start(second)
    lone.compact()
    lone.clock.ahead_ms = 2 * DAY_MS
    lone.partition.expire_producers(DAY_MS, DAY_MS)
    lone.roll(filler=1)
    lone.compact()
    assert lone.partition.log.cleaned.purge_offset > 0
    if at_a_snapshot:
        lone.partition.advance_log_start(second)
    copied = from_wire(lone.partition.replica_state(lone.leader_epoch).producers)
    for header in lone.partition.log.headers(second):
        copied.replay(batch_info(header))
    assert copied.transactions.ongoing() == []


def test_a_log_that_begins_anew_claims_nothing_of_the_old_one(lone: CompactedPartition) -> None:
    lone.put((b"k", b"v"))
    lone.put((b"k", None))
    lone.roll()
    lone.compact()
    lone.clock.ahead_ms = 2 * DAY_MS
    lone.compact()
    log = lone.partition.log
    assert log.cleaned.purge_offset > 0
    (first,) = log.read(0, 1, log.log_end_offset)
    log.restart_at(0, [], [], purge_offset=0)
    assert log.cleaned == NEVER_CLEANED
    log.append([first], ProducerStates())  # whatever it holds: it is what follows
    lone.reopen(StartKind.PROCESS_CRASH)
    assert lone.partition.log.cleaned == NEVER_CLEANED
    lone.partition.log.restart_at(0, [], [], purge_offset=7)
    assert lone.partition.log.cleaned == Cleaned(purge_offset=7)


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_log_that_begins_anew_during_a_pass_is_not_marked_by_it(lone: CompactedPartition, steps: int) -> None:
    """Found by the simulator with seed 130006826: a replica that was rebuilt from its leader's log between the last
    step of a pass and its end was said to be clean, and committed, as far as the old one. Its leader had purged more
    than the mark said, so that its followers would have missed deletions.
    """
    for number in range(6):
        lone.put((b"k", b"v%d" % number))
    lone.roll()
    running = lone.passes().steps()
    for _ in range(steps):
        next(running, None)
    lone.partition.log.restart_at(0, [], [], purge_offset=25)
    for _ in running:
        pass
    assert lone.partition.log.cleaned == Cleaned(purge_offset=25)


@pytest.mark.parametrize("later", ["batches", "epoch"])
def test_what_is_committed_of_a_producer_outlives_its_later_batches(lone: CompactedPartition, later: str) -> None:
    """Story: a leader compacted, with newer batches of a producer that were not committed. A replica copied its log,
    lost these batches and led: its producer could not go on, and a retry of the committed ones would be stored twice.
    """
    for n in range(5):
        lone.put((b"k", b"%d" % n), pid=9, sequence=n)
    lone.put((b"k", b"newest"))
    lone.roll()
    committed = lone.partition.log.log_end_offset
    lone.leader_epoch += 1
    in_sync = LeaderAndIsr(0, lone.leader_epoch, lone.leader_epoch, (0, 1), (0, 1))
    lone.partition.assign(in_sync, lone.topic, {0: 1, 1: 1})
    for n in range(5):
        sequence, epoch = (5 + n, 0) if later == "batches" else (n, 1)
        lone.put_uncommitted((b"k", b"uncommitted"), pid=9, epoch=epoch, sequence=sequence)
    assert lone.partition.replica.high_watermark == committed
    assert lone.compact() == 1
    copied = ProducerStates()
    for header in lone.headers():
        if header.base_offset < committed:
            copied.replay(batch_info(header))
    ((producer, entry),) = copied.entries()
    assert (producer, entry.producer_epoch, [batch.sequence for batch in entry.batches]) == (9, 0, [0, 1, 2, 3, 4])


def test_a_producer_that_was_forgotten_keeps_no_place(lone: CompactedPartition) -> None:
    lone.put((b"k", b"1"), pid=7)
    lone.put((b"k", b"2"))
    lone.roll()
    lone.clock.ahead_ms = DAY_MS
    lone.partition.expire_producers(1000, 1000)
    lone.compact()
    lone.check()
    assert not [header for header in lone.headers() if header.producer_id == 7]


@pytest.mark.parametrize("start", StartKind)
def test_a_restart_finds_what_was_compacted(lone: CompactedPartition, start: StartKind) -> None:
    for version in range(60):
        lone.put((b"k-%d" % (version % 4), b"%d" % version))
    lone.roll()
    lone.compact()
    before, cleaned = lone.rows(), lone.partition.log.cleaned
    lone.reopen(start, high_watermark=0)
    assert lone.rows() == before
    assert lone.partition.log.cleaned == cleaned
    assert lone.partition.replica.high_watermark >= cleaned.clean_to
    lone.roll(filler=1)
    lone.compact()
    lone.check()


def purged(lone: CompactedPartition, key: bytes) -> None:
    """Write a record, delete it, and have the tombstone forgotten."""
    lone.put((key, b"v"))
    lone.put((key, None))
    lone.roll()
    lone.compact()
    lone.clock.ahead_ms += 2 * DAY_MS
    lone.compact()


@pytest.mark.parametrize("start", [StartKind.CLEAN, StartKind.PROCESS_CRASH, StartKind.MACHINE_CRASH])
@pytest.mark.parametrize("older", [False, True], ids=["gone", "an older copy"])
def test_a_log_that_has_lost_what_is_known_of_its_compaction_is_damaged(
    lone: CompactedPartition, start: StartKind, older: bool
) -> None:
    """Story: a leader came back without this file. A follower whose log ended below the purged tombstones went on from
    its end. Keys that were deleted stayed alive there, and it joined the ISR.
    """
    path = lone.directory / COMPACTION_FILE
    purged(lone, b"a")
    before = path.read_bytes()
    purged(lone, b"b")
    assert lone.partition.log.cleaned.purge_offset > 4
    lone.close(clean=start is StartKind.CLEAN)
    if older:
        path.write_bytes(before)
    else:
        path.unlink()
    with pytest.raises(DamagedLogError, match=f"compaction.json is {'an older one' if older else 'gone'}"):
        ReplicaLog(lone.directory, lone.topic, start)


@pytest.mark.parametrize("keeps_file", [True, False])
def test_a_log_of_an_earlier_version_is_opened_as_before(lone: CompactedPartition, keeps_file: bool) -> None:
    """Its state says nothing of compaction. From the first start on it does."""
    purged(lone, b"a")
    cleaned = lone.partition.log.cleaned
    lone.close(clean=True)
    state = read_log_state(lone.directory)
    assert (state.purge_offset, state.committed_to) == (cleaned.purge_offset, cleaned.committed_to)
    write_log_state(lone.directory, LogState(state.log_start_offset, state.recovery_point))
    assert b"purge_offset" not in (lone.directory / LOG_STATE_FILE).read_bytes(), "an earlier version can read it"
    if not keeps_file:
        (lone.directory / COMPACTION_FILE).unlink()
    lone.reopen(StartKind.CLEAN)
    assert lone.partition.log.cleaned == (cleaned if keeps_file else NEVER_CLEANED)
    assert read_log_state(lone.directory) == (state if keeps_file else state.knowing(NEVER_CLEANED))


def test_lookups_by_time_find_what_is_left(lone: CompactedPartition) -> None:
    lone.put((b"k", b"1"))
    lone.put((b"other", b"1"))
    lone.clock.ahead_ms = 10_000
    lone.put((b"k", b"2"))
    lone.roll()
    lone.compact()
    reader = lone.partition.reader
    assert reader.offset_at(lone.leader_epoch, 0, read_committed=True)[0] == 1  # type: ignore[index]
    since = lone.clock.wall_ms() - 5_000
    assert reader.offset_at(lone.leader_epoch, since * 1000, read_committed=True)[0] == 2  # type: ignore[index]


@pytest.fixture
def with_aborted(lone: CompactedPartition) -> CompactedPartition:
    """Five aborted transactions, and a committed one of the same producer."""
    for epoch in range(6):
        offset = lone.put((b"k", b"%d" % epoch), pid=7, epoch=epoch, txn=True)
        lone.finish(7, epoch + 1, committed=epoch == 3, offsets=[offset])
    lone.roll()
    assert len(lone.partition.replica.producers.transactions.aborted()) == 5
    return lone


def test_aborted_transactions_are_forgotten_once_their_records_are_gone(with_aborted: CompactedPartition) -> None:
    """Story: only the log start made a replica forget them, and that of a compacted log never moves."""
    with_aborted.compact()
    assert with_aborted.partition.replica.producers.transactions.aborted() == []
    assert [value for _, key, value in with_aborted.rows() if key == b"k"] == [b"3"]
    offset = with_aborted.put((b"k", b"more"), pid=7, epoch=6, txn=True)
    with_aborted.finish(7, 7, committed=False, offsets=[offset])
    assert [value for _, key, value in with_aborted.consumed() if key == b"k"] == [b"3"]
    with_aborted.check()


@pytest.mark.parametrize("way", ["read", "grant", "offset_at"])
def test_a_read_that_a_pass_overtakes_shows_nothing_that_was_aborted(
    with_aborted: CompactedPartition, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    partition, epoch = with_aborted.partition, with_aborted.leader_epoch
    passes: list[int] = []

    def overtaken(read: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: int) -> object:
            found = read(*arguments)
            if not passes:
                passes.append(with_aborted.compact())
            return found

        return call

    for name in ("read_log", "locate"):
        monkeypatch.setattr(partition, name, overtaken(getattr(partition, name)))
    if way == "offset_at":
        found = partition.reader.offset_at(epoch, 0, read_committed=True)
        assert found is not None
        assert found[0] == 6
    elif way == "read":
        read = partition.reader.read(epoch, 0, 1 << 20, read_committed=True)
        assert (read.frames, read.next_offset) == ([], 0)
    else:
        grant = partition.reader.grant(epoch, 0, 1 << 20, read_committed=True)
        assert (grant.runs, grant.read.next_offset) == ([], 0)
    assert passes
    again = partition.reader.read(epoch, 0, 1 << 20, read_committed=True)
    assert [frame.header.base_offset for frame in again.frames][:1] == [6]


def test_lookups_by_time_work_where_the_log_begins_within_a_gap(lone: CompactedPartition) -> None:
    """Story: replicas compact by themselves, and a leader's retention moves the log start to the end of one of its own
    batches. That was within a gap of the next leader's, where each lookup of an earlier time failed.
    """
    for n in range(8):
        lone.put((b"k", b"%d" % n))
    lone.roll()
    lone.compact()
    gap = next(iter(lone.partition.log.headers(0)))
    assert gap.next_offset > 4
    lone.partition.replica.advance_log_start(4)  # as a follower does
    lone.partition.log.advance_log_start(4)
    found = lone.partition.reader.offset_at(lone.leader_epoch, 0, read_committed=True)
    assert found is not None
    assert found[0] == 7


def test_a_record_without_a_key_is_refused_and_loses_nothing(lone: CompactedPartition) -> None:
    with pytest.raises(InvalidRecordError, match=r"2 of 2 records for t have no key \(key\)"):
        check_keys(batch(b"a", b"b"), lone.topic)
    with pytest.raises(InvalidRecordError):
        lone.write(b"a", transactional=False)
    assert lone.partition.replica.log_end_offset == 0


def test_records_without_a_key_from_before_stay(tmp_path: Path) -> None:
    lone = CompactedPartition(tmp_path / "t-0", {"cleanup.policy": "delete"})
    lone.write(b"keyless", b"keyless", transactional=False)
    lone.put((b"k", b"1"))
    lone.put((b"k", b"2"))
    lone.roll()
    assert lone.compact() == 0
    compacted = CompactedPartition(tmp_path / "other", {})
    lone.topic = compacted.topic
    lone.reopen(StartKind.CLEAN)
    lone.compact()
    assert [value for _, _, value in lone.rows()].count(b"keyless") == 2
    assert [value for _, key, value in lone.rows() if key == b"k"] == [b"2"]


def test_retention_deletes_segments_only_where_the_policy_says_so(tmp_path: Path) -> None:
    for policy, start in (("compact", 0), ("compact,delete", 7)):
        lone = CompactedPartition(tmp_path / policy, {"cleanup.policy": policy, "retention.ms": "60000"})
        for key in range(3):
            lone.put((b"k-%d" % key, bytes(1500)))
            lone.put((b"k-%d" % key, bytes(1500)))
        lone.put((b"last", bytes(2500)))
        lone.clock.ahead_ms = 120_000
        lone.put((b"last", bytes(2500)))
        lone.partition.apply_retention()
        assert lone.partition.replica.log_start_offset == start, policy


def test_retention_after_compaction_keeps_the_producers(tmp_path: Path) -> None:
    lone = CompactedPartition(tmp_path / "t-0", {"cleanup.policy": "compact,delete", "retention.ms": "60000"})
    for n in range(3):
        lone.put((b"k-%d" % n, bytes(1500)), pid=7, sequence=n)
    lone.roll()
    lone.compact()
    lone.clock.ahead_ms = 3_600_000
    lone.roll(filler=1)
    lone.partition.apply_retention()
    assert lone.partition.replica.log_start_offset > 3
    lone.reopen(StartKind.PROCESS_CRASH)
    assert lone.put((b"k-2", bytes(1500)), pid=7, sequence=2) == 2


def test_retention_after_compaction_frees_room_on_a_full_disk() -> None:
    """Story: a pass removes the snapshots of producers within it. Retention has to write one first, and on the full
    disk that it was to free it never could.
    """
    fs, directory = sim_directory()
    settings = {"cleanup.policy": "compact,delete", "retention.bytes": "20000", "segment.bytes": "3500"}
    lone = CompactedPartition(directory, settings, fs=fs)
    for n in range(30):
        lone.put((b"k-%d" % n, bytes(900)), pid=7, sequence=n)
    lone.roll()
    lone.compact()
    lone.partition.flush()
    fs.capacity_bytes = used = fs.used_bytes
    lone.partition.apply_retention()
    assert fs.used_bytes < used - 5000
    assert lone.partition.replica.log_start_offset > 3
    lone.reopen(StartKind.PROCESS_CRASH)
    assert lone.put((b"k-29", bytes(900)), pid=7, sequence=29) == 29


def test_records_of_a_topic_that_is_only_compacted_are_deleted_by_tombstones(lone: CompactedPartition) -> None:
    lone.put((b"k", b"v"))
    with pytest.raises(PolicyViolationError, match="tombstone"):
        lone.partition.reader.records_to_delete(lone.leader_epoch, 1)
