"""The history of leader epochs that a replica opens with: what its batches say counts, and not an older file."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from spark_broker.broker.replica_log import ReplicaLog
from spark_broker.broker.topic import Topic
from spark_broker.controller.image import TopicState
from spark_broker.core.epochs import EpochHistory
from spark_broker.core.producers import ProducerStates
from spark_broker.protocol.schema import DEFAULT_SCHEMA, schema_to_bytes
from spark_broker.storage.checkpoints import LEADER_EPOCHS_FILE
from spark_broker.storage.files import write_atomically
from spark_broker.storage.start_kind import StartKind
from tests.broker.rig import TOPIC_ID
from tests.storage.logs import make_frame, sim_directory

TOPIC = Topic.of(
    TopicState("t", TOPIC_ID, MappingProxyType({}), schemas=(schema_to_bytes(DEFAULT_SCHEMA),), partitions=())
)


def append(log: ReplicaLog, epoch: int, batches: int) -> None:
    """Batches of two records, of this epoch."""
    for _ in range(batches):
        end = log.log_end_offset
        log.append([make_frame(end, 2, leader_epoch=epoch, first=end == 0)], ProducerStates())


def history(*pairs: tuple[int, int]) -> EpochHistory:
    return EpochHistory.from_pairs(list(pairs))


@pytest.mark.parametrize("start", StartKind)
@pytest.mark.parametrize(
    ("cut_to", "then"),
    [
        (6, [(3, 5)]),  # Epoch 3 begins where the older file has epoch 1.
        (6, [(3, 5), (5, 1)]),
        (6, [(1, 5)]),  # Another leader of epoch 1 had more of it: the older file has an epoch too many.
        (12, [(3, 1)]),  # The older file only lacks the newest.
        (10, [(3, 2), (4, 1)]),
    ],
)
def test_an_older_file_does_not_say_where_epochs_begin(
    cut_to: int, then: list[tuple[int, int]], start: StartKind
) -> None:
    """Story: `leader-epochs.json` was put back from a copy. The leader told a follower whose records differed from its
    own that they were the same.
    """
    fs, directory = sim_directory()
    log = ReplicaLog(directory, TOPIC, StartKind.CLEAN, fs=fs)
    append(log, 1, 5)
    log.save_epochs(history((1, 0)))
    append(log, 2, 3)
    log.save_epochs(history((1, 0), (2, 10)))
    log.flush()
    older = fs.read_bytes(directory / LEADER_EPOCHS_FILE)
    log.truncate_to(cut_to)
    epochs = history((1, 0), (2, 10)).truncate_to(cut_to)
    for epoch, batches in then:
        epochs = epochs.assign(epoch, log.log_end_offset)
        log.save_epochs(epochs)
        append(log, epoch, batches)
    log.flush()
    log.close(clean=True)
    fs = fs.crash_process()
    write_atomically(fs, directory / LEADER_EPOCHS_FILE, older)
    opened = ReplicaLog(directory, TOPIC, start, fs=fs)
    assert opened.state(high_watermark=6).epochs == epochs
