"""A reader on the leader's machine reads the leader's files, and gets what the leader would have sent."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from spark_broker import Admin, NewTopic, Producer
from spark_broker.client.local_files import LocalFiles
from spark_broker.client.retry import Deadline
from spark_broker.config import ConsumerConfig
from spark_broker.model import ConsumedBatch
from spark_broker.protocol.crc32c import Buffer
from spark_broker.protocol.frame import Frame
from spark_broker.protocol.messages import BrokerMetadata, FileExtent
from spark_broker.spark import range_reader
from spark_broker.spark.cluster import connected
from spark_broker.spark.range_reader import RangeReader
from spark_broker.spark.ranges import OffsetRange
from spark_broker.storage.filesystem import LocalFileSystem
from tests.support.process_cluster import ProcessCluster

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("score", pa.float64())])
ROWS = 200
BATCHES = 30


@dataclass
class Extents:
    """The extents that were read from files; `refused` counts the reads that failed."""

    read: list[FileExtent]
    refused: int = 0

    @property
    def paths(self) -> set[str]:
        return {extent.path for extent in self.read}


@pytest.fixture
def extents(monkeypatch: pytest.MonkeyPatch) -> Extents:
    seen = Extents([])
    frames = LocalFiles.frames

    def watched(self: LocalFiles, headers: Buffer, extents: Sequence[FileExtent]) -> list[Frame]:
        try:
            read_frames = frames(self, headers, extents)
        except BaseException:
            seen.refused += 1
            raise
        seen.read += extents
        return read_frames

    monkeypatch.setattr(LocalFiles, "frames", watched)
    return seen


def rows(number: int) -> pa.RecordBatch:
    ids = range(number * ROWS, (number + 1) * ROWS)
    return pa.RecordBatch.from_arrays(
        [pa.array(ids), pa.array([f"n{n}" for n in ids]), pa.array(map(float, ids))], schema=SCHEMA
    )


@pytest.fixture(scope="module")
def topics(process_cluster: ProcessCluster) -> str:
    """A bootstrap address. Topics `plain` and `packed` (compressed) have several segments, `mixed` has transactions."""
    servers = process_cluster.bootstrap_servers
    settings = {"segment.bytes": "20000"}
    with Admin(servers) as admin:
        for name in ("plain", "packed", "mixed"):
            admin.create_topic(NewTopic(name, partitions=1, schema=SCHEMA, config=settings))
    for name, compression in (("plain", "none"), ("packed", "zstd")):
        with Producer(servers, compression_type=compression) as producer:
            for number in range(BATCHES):
                producer.append(name, rows(number)).result()
    with Producer(servers, transactional_id="mixed") as producer:
        producer.init_transactions()
        for number in range(BATCHES):
            producer.begin_transaction()
            producer.append("mixed", rows(number)).result()
            if number % 3 == 1:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
    return servers


def batches_of(
    servers: str,
    topic: str,
    *,
    columns: list[str] | None = None,
    start: int = 0,
    local: bool = True,
    isolation: str = "read_committed",
    **settings: str,
) -> Iterator[list[ConsumedBatch]]:
    given = {"bootstrap.servers": servers, "isolation.level": isolation, **settings}
    config = ConsumerConfig.parse(given)
    with Admin(servers) as admin:
        description = admin.describe_topic(topic)
    with connected(config) as metadata:
        view = metadata.topic(topic, Deadline.after_ms(10_000))
        end = description.partitions[0].high_watermark
        assert end is not None
        part = OffsetRange(topic, view.topic_id, 0, start, end)
        yield from RangeReader(metadata, part, config, columns, local_reads=local).batches()


def read(servers: str, topic: str, **how: object) -> list[tuple[int, int, object, object]]:
    """Every batch, with everything that a reader gets of it."""
    return [
        (batch.base_offset, batch.leader_epoch, batch.data.to_pydict(), batch.timestamps.to_pylist())
        for batches in batches_of(servers, topic, **how)  # type: ignore[arg-type]
        for batch in batches
    ]


@pytest.mark.parametrize("columns", [None, ["score"], ["name", "id"]])
@pytest.mark.parametrize("topic", ["plain", "packed", "mixed"])
def test_local_reads_give_what_the_leader_sends(
    topics: str, extents: Extents, topic: str, columns: list[str] | None
) -> None:
    sent = read(topics, topic, columns=columns, local=False)
    assert not extents.read
    assert read(topics, topic, columns=columns) == sent
    assert len(extents.paths) > 1, "sealed segments and the active one"
    assert not extents.refused


def test_aborted_batches_are_not_read_at_all(topics: str, extents: Extents) -> None:
    committed = read(topics, "mixed")
    granted = sum(extent.length for extent in extents.read)
    extents.read.clear()
    everything = read(topics, "mixed", isolation="read_uncommitted")
    assert everything == read(topics, "mixed", isolation="read_uncommitted", local=False)
    assert len(everything) == BATCHES
    assert len(committed) == BATCHES * 2 // 3
    assert granted < sum(extent.length for extent in extents.read) * 0.75


def test_a_range_may_begin_within_a_batch_and_answers_are_as_large_as_asked(topics: str, extents: Extents) -> None:
    how = {"start": ROWS + 7, "max.partition.fetch.bytes": "30000"}
    assert read(topics, "plain", **how) == read(topics, "plain", local=False, **how)
    assert max(extent.length for extent in extents.read) <= 30_000


def test_a_small_answer_does_not_wait_for_fetch_min_bytes(topics: str, extents: Extents) -> None:
    """The bytes in files count. If only those of the answer did, it would come after fetch.max.wait.ms."""
    how = {"fetch.min.bytes": "10000", "fetch.max.wait.ms": "60000", "request.timeout.ms": "61000"}
    assert len(read(topics, "plain", **how)) == BATCHES
    assert extents.read


def test_on_another_machine_the_leader_sends_the_batches(
    topics: str, extents: Extents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "this_boot_id", lambda: "another")
    assert len(read(topics, "plain")) == BATCHES
    assert not extents.read
    assert not extents.refused


# The brokers are other processes, so only the reader has these faults.


def not_permitted(patch: pytest.MonkeyPatch) -> None:
    def refuse(_: LocalFileSystem, directory: Path, relative: Path, flags: int) -> int:
        raise PermissionError(errno.EACCES, f"not yours, with flags {flags}", str(directory / relative))

    patch.setattr(LocalFileSystem, "open_beneath", refuse)


def another_file(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the same name and size, as in a container of the same machine."""

    def copied(fs: LocalFileSystem, directory: Path, relative: Path, flags: int) -> int:
        copy = tmp_path / "copy"
        copy.write_bytes((directory / relative).read_bytes())
        return fs.open(copy, flags)

    patch.setattr(LocalFileSystem, "open_beneath", copied)


def broken_disk(patch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    patch.setattr(LocalFileSystem, "pread_into", fail)


def shorter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalFileSystem, "pread_into", lambda *_: 0)


def other_bytes(patch: pytest.MonkeyPatch) -> None:
    real = LocalFileSystem.pread_into

    def flipped(fs: LocalFileSystem, fd: int, target: memoryview, position: int) -> int:
        count = real(fs, fd, target, position)
        target[count // 2] ^= 1
        return count

    patch.setattr(LocalFileSystem, "pread_into", flipped)


def in_pieces(patch: pytest.MonkeyPatch) -> None:
    real = LocalFileSystem.pread_into
    patch.setattr(LocalFileSystem, "pread_into", lambda fs, fd, target, position: real(fs, fd, target[:1000], position))


@pytest.mark.parametrize("fault", [not_permitted, broken_disk, shorter, other_bytes])
def test_what_cannot_be_read_here_comes_from_the_leader(
    topics: str, extents: Extents, monkeypatch: pytest.MonkeyPatch, fault: object
) -> None:
    sent = read(topics, "mixed", local=False)
    fault(monkeypatch)  # type: ignore[operator]
    assert read(topics, "mixed") == sent
    assert extents.refused == 1, "it is tried once"
    assert not extents.read


def test_a_file_of_the_same_name_is_not_read(
    topics: str, extents: Extents, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    another_file(monkeypatch, tmp_path)
    assert len(read(topics, "plain")) == BATCHES
    assert (extents.read, extents.refused) == ([], 1)


def test_a_leader_that_names_other_files_is_noted_and_sends_the_batches(
    topics: str, extents: Extents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = LocalFiles.frames
    passwd = Path("/etc/passwd").stat()

    def hostile(self: LocalFiles, headers: Buffer, named: Sequence[FileExtent]) -> list[Frame]:
        place = {"path": "/etc/passwd", "device": passwd.st_dev, "inode": passwd.st_ino}
        return real(self, headers, [msgspec.structs.replace(extent, **place) for extent in named])

    sent = read(topics, "plain", local=False)
    monkeypatch.setattr(LocalFiles, "frames", hostile)
    assert read(topics, "plain") == sent
    assert (extents.read, extents.refused) == ([], 1)
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "/etc/passwd is not in the leader's log directory" in warning.getMessage()


def test_of_a_leader_whose_directory_is_not_known_no_file_is_read(
    topics: str, extents: Extents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a broker of an earlier version."""
    monkeypatch.setattr(BrokerMetadata, "directory", "")
    assert len(read(topics, "plain")) == BATCHES
    assert (extents.read, extents.refused) == ([], 0)


def test_a_read_may_come_in_pieces(topics: str, extents: Extents, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces(monkeypatch)
    assert len(read(topics, "plain")) == BATCHES
    assert extents.read
    assert not extents.refused
