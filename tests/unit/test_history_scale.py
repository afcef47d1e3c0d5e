"""A history of a million records, read whole many times, is checked in bounded memory; the time-out bounds the time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOM_BYTES = 2 << 30

JUDGE_A_MILLION = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
from spark_broker.model import TopicPartition
from spark_broker.testing.checker import check_history
from spark_broker.testing.history import Run
from spark_broker.testing.recorder import HistoryRecorder

ROWS, BATCHES, PARTITIONS = 100, 10_000, 4
recorder = HistoryRecorder()
partitions = [TopicPartition("t", number) for number in range(PARTITIONS)]
runs = []
for reader in ("r", "s"):
    for partition in partitions:
        recorder.positioned(reader, partition, 0)
for batch in range(BATCHES):
    partition, base_offset = partitions[batch % PARTITIONS], batch // PARTITIONS * ROWS
    values = tuple(b"writer-%d-%d" % (batch, row) for row in range(ROWS))
    operation = recorder.invoked("writer", partition, values)
    recorder.acknowledged(operation, base_offset)
    for reader in ("r", "s"):
        recorder.polled(reader, partition, base_offset, [bytes(bytearray(value)) for value in values])
    runs.append(Run(partition, base_offset, values))
    if batch % 1000 == 999:
        recorder.snapshot_began(f"on the way {batch}")
        recorder.snapshot_of_runs(f"on the way {batch}", runs, final=False)
for source in ("consumer", "DataFrame"):
    recorder.snapshot_of_runs(source, runs)
lost = runs.pop()
assert check_history(recorder.history()).ok
recorder.snapshot_of_runs("another", runs)
found = check_history(recorder.history()).violations
assert len(found) == ROWS, len(found)
assert {violation.kind.name for violation in found} == {"SOURCES_DIFFER"}
"""


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_million_records_are_judged_within_two_gigabytes() -> None:
    command = [sys.executable, "-c", JUDGE_A_MILLION, str(ROOM_BYTES)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
