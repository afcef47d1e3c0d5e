"""After an unclean election every replica has the new leader's log, and readers learn where theirs diverges."""

from __future__ import annotations

import pytest

from spark_broker.core.divergence import Diverging, FetchPosition, check_lineage, truncation_offset
from spark_broker.core.epochs import EpochHistory
from spark_broker.errors import LogTruncationError, SparkBrokerError, UnknownLeaderEpochError
from tests.unit.core.checker import check_healed
from tests.unit.core.harness import Cluster


def leader_alone() -> Cluster:
    """Broker 1 has committed values 1, 2 and 3. Brokers 2 and 3 have only the first, and are outside the ISR."""
    cluster = Cluster(min_insync_replicas=1)
    cluster.append(1, 1)
    cluster.replicate()
    cluster.controller.fence(2, 3)
    cluster.deliver_all()
    cluster.append(1, 2)
    cluster.append(1, 3)
    assert cluster.acknowledged == {1: 0, 2: 1, 3: 2}
    return cluster


def elect_uncleanly(cluster: Cluster, broker: int) -> None:
    """Records that broker 1 has acknowledged and the others lack are lost."""
    for value in (2, 3):
        del cluster.acknowledged[value]
    for follower in (2, 3):
        cluster.controller.unfence(follower)
    cluster.controller.elect_uncleanly(broker)
    cluster.deliver_all()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_old_leader_comes_back_as_a_follower_without_the_records_that_were_given_up(checkpointed: bool) -> None:
    """It is rebuilt if its checkpointed high watermark is above the divergence; else it is truncated."""
    cluster = leader_alone()
    if checkpointed:
        cluster.checkpoint(1)
    cluster.crash(1)
    cluster.controller.fence(1)
    elect_uncleanly(cluster, 2)
    cluster.append(2, 4)
    cluster.append(2, 5)
    cluster.start(1)
    cluster.settle()
    assert [cluster.values(broker) for broker in (1, 2, 3)] == [[1, 4, 5]] * 3
    check_healed(cluster)


def test_a_replica_that_slept_through_several_elections_ends_with_the_same_log() -> None:
    cluster = leader_alone()
    cluster.checkpoint(1)
    cluster.crash(1)
    cluster.controller.fence(1)
    elect_uncleanly(cluster, 3)
    cluster.append(3, 4)
    cluster.settle()
    cluster.elect(2)
    cluster.append(2, 5)
    cluster.settle()
    cluster.elect(3)
    cluster.append(3, 6)
    cluster.start(1)
    cluster.settle()
    assert [cluster.values(broker) for broker in (1, 2, 3)] == [[1, 4, 5, 6]] * 3
    check_healed(cluster)


def check(cluster: Cluster, broker: int, offset: int, last_epoch: int) -> SparkBrokerError | None:
    """The leader's answer to a reader that has read up to `offset`, whose last record is of `last_epoch`."""
    replica = cluster.replica(broker)
    try:
        replica.check_lineage(replica.assignment.leader_epoch, offset, last_epoch)
    except SparkBrokerError as error:
        return error
    return None


def test_a_reader_of_the_lost_records_is_told_and_one_of_the_kept_is_not() -> None:
    cluster = leader_alone()
    cluster.controller.fence(1)
    elect_uncleanly(cluster, 2)
    for value in (4, 5, 6):
        cluster.append(2, value)
    assert check(cluster, 2, 1, last_epoch=0) is None
    for offset in (2, 3):
        error = check(cluster, 2, offset, last_epoch=0)
        assert isinstance(error, LogTruncationError)
        assert (error.divergent_offset, error.diverging_epoch) == (1, 0)


def test_a_reader_of_a_clean_leaders_log_is_never_told_of_a_truncation() -> None:
    cluster = Cluster(min_insync_replicas=2)
    cluster.append(1, 1)
    cluster.replicate()
    cluster.append(1, 2)  # never committed
    cluster.controller.fence(1)
    cluster.deliver_all()
    assert check(cluster, 2, 1, last_epoch=0) is None
    cluster.append(2, 3)
    cluster.replicate()
    assert check(cluster, 2, 2, last_epoch=cluster.replica(2).assignment.leader_epoch) is None


def test_an_older_leader_does_not_judge_what_was_read_of_a_newer_one() -> None:
    """KIP-232: a committed offset may be ahead of the metadata of the reader that resumes from it."""
    cluster = Cluster()
    cluster.append(1, 1)
    assert isinstance(check(cluster, 1, 9, last_epoch=4), UnknownLeaderEpochError)


HISTORY = EpochHistory.from_pairs([(0, 0), (3, 7)])


@pytest.mark.parametrize(
    ("offset", "last_epoch", "divergent"),
    [
        (7, 0, None),
        (8, 0, 7),
        (10, 3, None),
        (11, 3, 10),
        (10, 2, 7),
        (5, 2, 5),
        (10, 5, 10),
        (99, -1, None),
        (0, 3, None),
    ],
)
def test_where_the_log_parts_from_what_was_read(offset: int, last_epoch: int, divergent: int | None) -> None:
    read = FetchPosition(leader_epoch=6, fetch_offset=offset, last_fetched_epoch=last_epoch)
    if divergent is None:
        check_lineage(HISTORY, 0, 10, read)
    else:
        with pytest.raises(LogTruncationError) as caught:
            check_lineage(HISTORY, 0, 10, read)
        assert caught.value.divergent_offset == divergent


def test_a_reader_that_remembers_epochs_finds_the_cut_below_the_leaders_end_of_the_epoch() -> None:
    """The leader has seven records of epoch 0, of which the reader saw five before epoch 2 began."""
    lineage = EpochHistory.from_pairs([(0, 0), (2, 5)])
    assert truncation_offset(lineage, 10, Diverging(0, 7)) == 5


def test_a_position_below_the_log_start_is_out_of_range_and_no_truncation() -> None:
    check_lineage(EpochHistory.from_pairs([(3, 50)]), 50, 60, FetchPosition(3, 20, 1))
    check_lineage(EpochHistory.from_pairs([(3, 50)]), 50, 60, FetchPosition(3, 50, 1))
