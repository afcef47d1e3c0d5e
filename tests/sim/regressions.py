"""Seeds that found something, and where it was mended.

A change of the simulator may make a seed tell another story. The proof is then the scene in `test_findings.py` or the
unit test beside the mended code; these show that the whole holds together.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Regression:
    """A seed and the number of its events; what it found, and where that was mended."""

    seed: int
    events: int
    found: str
    mended: str


REGRESSIONS = [
    Regression(
        seed=1,
        events=500,
        found="a full disk ended the broker at the next checkpoint of high watermarks",
        mended="broker/maintenance.py, storage/directory.py",
    ),
    Regression(
        seed=455,
        events=500,
        found="a replica that could not be opened (EIO) stayed offline, and its broker was elected for it",
        mended="broker/replica_manager.py",
    ),
    Regression(
        seed=562,
        events=500,
        found="as 455",
        mended="broker/replica_manager.py",
    ),
    Regression(
        seed=584,
        events=500,
        found="as 455",
        mended="broker/replica_manager.py",
    ),
    Regression(
        seed=82,
        events=500,
        found="a recovery that failed was marked as done; pages of a failed fsync counted as written",
        mended="broker/replica_manager.py, storage/recovery.py",
    ),
    Regression(
        seed=623,
        events=500,
        found="a rebuilt replica forgot the running maximum timestamp (found with a bug put in)",
        mended="storage/log.py",
    ),
    Regression(
        seed=100251,
        events=500,
        found="as 104293",
        mended="driver/metadata_log.py, driver/controller_loop.py",
    ),
    Regression(
        seed=288,
        events=500,
        found="a leader whose log could not be read (EIO) went on leading, and nobody could follow it",
        mended="broker/partition.py",
    ),
    Regression(
        seed=105662,
        events=500,
        found="a batch was acknowledged before four earlier ones; a sixth pushed the first out of memory",
        mended="client/partition_queue.py",
    ),
    Regression(
        seed=103088,
        events=500,
        found="a producer that gave up batches under two ids in turn forgot that numbers of the first were missing",
        mended="client/partition_queue.py",
    ),
    Regression(
        seed=104293,
        events=500,
        found="a deposed controller with nothing to write kept a broker's session from the one that took over",
        mended="driver/metadata_log.py, driver/controller_loop.py",
    ),
    Regression(
        seed=5117,
        events=500,
        found="a follower ignored an answer, and was not told that high watermark again until it moved",
        mended="broker/fetch_session.py",
    ),
    Regression(
        seed=466845,
        events=500,
        found="a replica came back before its broker heard that it was gone, and was counted with the log about to go",
        mended="controller/partition_change.py",
    ),
    Regression(
        seed=443250,
        events=500,
        found="as 466845",
        mended="controller/partition_change.py",
    ),
    Regression(
        seed=423271,
        events=500,
        found="as 466845",
        mended="controller/partition_change.py",
    ),
    Regression(
        seed=417486,
        events=500,
        found="as 466845, seen from the other side: the leader waited for ever to hear how far the replica is",
        mended="controller/partition_change.py",
    ),
    Regression(
        seed=413174,
        events=500,
        found="a late request of a closed stream said less than the newer stream had, and nobody corrected it",
        mended="broker/replica_session.py",
    ),
    Regression(
        seed=423964,
        events=500,
        found="a full disk refused to cut the log, and the replica went on as if it had been cut",
        mended="core/replica.py",
    ),
    Regression(
        seed=407036,
        events=500,
        found="a log that ended at the leader's log start was taken for the leader's, whatever was in it",
        mended="core/epochs.py",
    ),
    Regression(
        seed=434780,
        events=500,
        found="as 407036, with the log start within a batch",
        mended="core/epochs.py",
    ),
    Regression(
        seed=453544,
        events=500,
        found="two controllers slept through a clean-up; the second took what the first had left for its own past",
        mended="driver/metadata_log.py",
    ),
    Regression(
        seed=403128,
        events=500,
        found="back at what it had committed before a commit that failed, a consumer did not commit it again",
        mended="client/consumer_machine.py",
    ),
    Regression(
        seed=404038,
        events=500,
        found="the rules: what an interrupted process left was judged as if only its successor could have mended it",
        mended="testing/simulation/invariants.py",
    ),
    Regression(
        seed=463574,
        events=500,
        found="the rules: records below the log start that a full disk had kept",
        mended="testing/simulation/invariants.py",
    ),
    Regression(
        seed=426938,
        events=500,
        found="the rules: what is committed is not known of a replica whose damage nobody has met yet",
        mended="testing/simulation/invariants.py",
    ),
    Regression(
        seed=809093,
        events=500,
        found="a full disk refused the last step of a cut; the segments above were gone, and the replica went on",
        mended="broker/partition.py",
    ),
    Regression(
        seed=878128,
        events=500,
        found="the rules: as 426938, for what readers of committed records are given",
        mended="testing/simulation/transaction_rules.py",
    ),
    Regression(
        seed=886252,
        events=500,
        found="the rules: a replica that was dropped and made again between two looks",
        mended="testing/simulation/invariants.py",
    ),
    Regression(
        seed=429391,
        events=500,
        found="as 417486",
        mended="controller/partition_change.py",
    ),
    Regression(
        seed=466718,
        events=500,
        found="as 417486",
        mended="controller/partition_change.py",
    ),
    Regression(
        seed=477397,
        events=500,
        found="as 423964",
        mended="core/replica.py",
    ),
    Regression(
        seed=431463,
        events=500,
        found="as 404038",
        mended="testing/simulation/invariants.py",
    ),
    Regression(
        seed=404741,
        events=500,
        found="as 426938",
        mended="testing/simulation/invariants.py",
    ),
    Regression(
        seed=493265,
        events=500,
        found="as 426938",
        mended="testing/simulation/invariants.py",
    ),
    Regression(
        seed=457209,
        events=500,
        found="the rules: two topics with one id",
        mended="testing/simulation/world.py",
    ),
    Regression(
        seed=404924,
        events=500,
        found="the rules: an election in the same commit was taken for a joining",
        mended="testing/simulation/invariants.py",
    ),
    Regression(
        seed=475937,
        events=500,
        found="as 404924",
        mended="testing/simulation/invariants.py",
    ),
    Regression(
        seed=1010151,
        events=500,
        found="a broker with a full disk sent heartbeats before its registration was answered, without a pause",
        mended="testing/simulation/broker.py",
    ),
    Regression(
        seed=1009417,
        events=500,
        found="a replica that was moved away and back was taken for one whose directory somebody had removed",
        mended="broker/log_opener.py",
    ),
    Regression(
        seed=30000956,
        events=500,
        found="the rules: a schedule ended before a consumer was told of a cut; the new log had the old one's length",
        mended="testing/simulation/ending.py",
    ),
    Regression(
        seed=40029335,
        events=500,
        found="a coordinator that had not learned of its successor answered with offsets that were no longer the last",
        mended="broker/group_coordinator.py",
    ),
    Regression(
        seed=50018167,
        events=500,
        found="a process died before it moved a damaged log away; the next one took this log for a rebuilt one",
        mended="broker/damaged.py, storage/quarantine.py",
    ),
    Regression(
        seed=10287,
        events=500,
        found="the end of a table was claimed to be of the last row's leader epoch, and looked like a truncation",
        mended="client/history_reader.py",
    ),
    Regression(
        seed=43,
        events=500,
        found="a broker that lagged behind did not know which rows had been deleted from a table",
        mended="client/metadata.py, controller/calls.py",
    ),
    Regression(
        seed=634,
        events=500,
        found="the rules: a snapshot may be of a process that had forgotten idle producers",
        mended="testing/simulation/transaction_rules.py",
    ),
    Regression(
        seed=1000049,
        events=500,
        found="a log that was never truncated led after an unclean election, with other records than the topic's table",
        mended="core/replica.py, controller/history.py",
    ),
    Regression(
        seed=1006818,
        events=500,
        found="a commit was recorded whole by one tierer while another one cut the table back",
        mended="history/attempt.py, history/plan.py",
    ),
    Regression(
        seed=9008126,
        events=500,
        found="a log that began anew within a batch of a later leader's log could not be appended to, and never joined",
        mended="core/replica.py",
    ),
    Regression(
        seed=90000652,
        events=500,
        found="compaction kept the places of a producer's uncommitted batches, and not of the committed ones before",
        mended="broker/compaction.py, core/compaction.py",
    ),
    Regression(
        seed=91000039,
        events=500,
        found="compaction kept the places of a producer's uncommitted batches, and not of the committed ones before",
        mended="broker/compaction.py, core/compaction.py",
    ),
    Regression(
        seed=3000777,
        events=500,
        found="out of descriptors, a follower stopped within an answer, and went on with its batches: the broker ended",
        mended="broker/partition.py",
    ),
    Regression(
        seed=60007652,
        events=500,
        found="a copy of the metadata was accepted twice, and both times the same leader epochs were given out",
        mended="controller/lineage.py",
    ),
    Regression(
        seed=50009497,
        events=500,
        found="after older metadata was accepted, a producer kept the brokers of the records that were lost, for ever",
        mended="client/cluster_view.py",
    ),
    Regression(
        seed=93300029,
        events=500,
        found="the simulator ended before a broker had applied older metadata, and called what waited for it deleted",
        mended="testing/simulation/ending.py, testing/simulation/older_metadata.py",
    ),
    Regression(
        seed=120000093,
        events=500,
        found="out of descriptors, two removals of a replica were carried out together, and one was never finished",
        mended="broker/replica_files.py, broker/file_jobs.py",
    ),
    Regression(
        seed=5026,
        events=500,
        found="on a full disk, a replica that was in sync again stayed on the list of the damaged ones",
        mended="broker/damaged.py",
    ),
    Regression(
        seed=130006536,
        events=500,
        found="a start without descriptors did not see a deleted topic's directory, which kept the next topic out",
        mended="storage/directory.py, broker/replica_files.py",
    ),
    Regression(
        seed=130006826,
        events=500,
        found="a pass marked a log that had begun anew since as clean and committed",
        mended="broker/compaction.py",
    ),
    Regression(
        seed=140002057,
        events=500,
        found="a reader at an undecided transaction whose records were deleted heard of it at the end of its wait",
        mended="broker/partition.py",
    ),
    Regression(
        seed=130003816,
        events=500,
        found="whoever waited for records of a replica that was moved away waited until its files were worked on",
        mended="broker/replica_manager.py",
    ),
    Regression(
        seed=130004347,
        events=500,
        found="an fsync that failed while a log was opened anew counted as a bug of ours",
        mended="broker/replica_files.py",
    ),
    Regression(
        seed=160008397,
        events=500,
        found="older metadata that was accepted twice gave out the same producer ids: no broker had saved them",
        mended="controller/lineage.py",
    ),
    Regression(
        seed=160005630,
        events=500,
        found="a try to tier failed on a bug where the table had a partition that its metadata lacked",
        mended="history/attempt.py",
    ),
    Regression(
        seed=160007457,
        events=500,
        found="a group's commits did not fit into a segment of the size that is the default of topics, for good",
        mended="controller/topics.py",
    ),
    Regression(
        seed=190040803,
        events=500,
        found="a process that died while a log was emptied to begin anew further on counted that log as damaged",
        mended="broker/partition.py",
    ),
    Regression(
        seed=200021227,
        events=500,
        found="(rig) an election of a broker that the same file of metadata took into the ISR counted as unclean",
        mended="testing/simulation/invariants.py",
    ),
    Regression(
        seed=200063189,
        events=500,
        found="(rig) a member was thought to know the name of a deleted topic that its next coordinator assigned",
        mended="testing/simulation/sharing_member.py",
    ),
    Regression(
        seed=210005248,
        events=500,
        found="a group that had resumed, and was cut by an unclean election, read on past the next one without notice",
        mended="client/partition_position.py",
    ),
    Regression(
        seed=210025022,
        events=500,
        found="a log that could not be emptied for want of descriptors was opened again with a lower high watermark",
        mended="broker/high_watermarks.py",
    ),
    Regression(
        seed=250001277,
        events=500,
        found="a batch that may be stored got another number behind one that was given up, and was there twice",
        mended="client/partition_queue.py",
    ),
    Regression(
        seed=270015885,
        events=500,
        found="(rig) a commit of a consumer without membership came after the end of its process, which nothing fences",
        mended="testing/simulation/network.py",
    ),
    Regression(
        seed=310070414,
        events=500,
        found="(rig) a broker that was killed went on holding its directory, after another launch had not got it",
        mended="testing/simulation/world.py",
    ),
    Regression(
        seed=310099040,
        events=500,
        found="older metadata accepted twice gave out the same leader epochs: no broker had saved the first time yet",
        mended="broker/replica_files.py",
    ),
    Regression(
        seed=5916,
        events=500,
        found="a broker that was not let in passed a request on to the controller of older metadata, which took it",
        mended="broker/requests.py",
    ),
    Regression(
        seed=600001101,
        events=500,
        found="the next read failed in a replica that had another copy by then, and the rules knew no cause",
        mended="testing/simulation/bit_flips.py: the rig's",
    ),
    Regression(
        seed=720000911,
        events=500,
        found="a log that a full disk had left half-way was opened again as one that was closed in order: damage",
        mended="broker/log_opener.py: _start_of",
    ),
    Regression(
        seed=800006211,
        events=500,
        found="(rig) logs were compared before one that a limit had refused files was opened anew",
        mended="testing/simulation/ending.py: _missing",
    ),
    Regression(
        seed=820003277,
        events=500,
        found="(rig) a reader was to hear of a cut below the log start: what had replaced its records was deleted, too",
        mended="testing/simulation/ending.py: _has_read_this",
    ),
]
