"""Rows of a table that take far more memory than their file are read in parts that fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_broker.client.table_file import bytes_alone
from tests.support.delta_files import append_file

MIB = 1024 * 1024

CHECK = """
import sys
import pyarrow as pa
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from spark_broker.client.table_file import Rows, TableFile

file = TableFile(SubTreeFileSystem(sys.argv[1], LocalFileSystem()), {"path": "large.parquet"})
print(file.check(Rows(0, 0, 10**9), {"text"}), pa.default_memory_pool().max_memory())
print(file.row_bytes(Rows(0, 0, 10**9), {"text"}))
"""


def with_offsets(text: pa.Array) -> pa.Table:
    count = len(text)
    offsets = pa.array(range(count))
    return pa.table(
        {
            "text": text,
            "_partition": pa.array([0] * count, pa.int32()),
            "_offset": offsets,
            "_timestamp": pa.array(range(count), pa.timestamp("us", "UTC")),
            "_leader_epoch": pa.array([0] * count, pa.int32()),
        }
    )


def alike(count: int, size_bytes: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["x" * size_bytes]))


def run(program: str, path: Path) -> list[int]:
    child = [sys.executable, "-c", program, str(path)]
    return [int(said) for said in subprocess.run(child, capture_output=True, check=True, timeout=60).stdout.split()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "alike", "different"])
def test_a_file_is_checked_without_room_for_each_row(tmp_path: Path, kind: str) -> None:
    """Stories: a file of 2 MB took 800 MB, because its rows share one value of 20 kB. When that was mended, a file
    whose values are all large and different took three times what they take.
    """
    size_bytes = 400_000 if kind == "different" else 20_000
    if kind == "different":
        text = pa.array([f"{n:04d}" * (size_bytes // 4) for n in range(500)])
    else:
        shared = alike(10_000, size_bytes)
        text = shared if kind == "shared" else shared.cast(pa.string())
    pq.write_table(
        with_offsets(text),
        tmp_path / "large.parquet",
        write_page_checksum=True,
        store_schema=False,
        use_dictionary=kind == "shared",
        write_batch_size=16,
    )
    found, peak_bytes, row_bytes = run(CHECK, tmp_path)
    assert found == len(text)
    assert peak_bytes < (192 if kind == "different" else 64) * MIB
    assert row_bytes == pytest.approx(size_bytes, rel=0.01)


READ = """
import re, sys
import pyarrow as pa
from pathlib import Path
from tests.client.test_damaged_history import HistoryReader, topic_of

topic = topic_of(Path(sys.argv[1]), pa.schema([("text", pa.string())]), 12_000)
rows = 0
for batch in HistoryReader(topic).batches(0, 0, 12_000):
    rows += batch.data.num_rows
print(rows, re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.slow
def test_a_table_whose_rows_are_larger_than_their_file_is_read_in_parts(tmp_path: Path) -> None:
    """Story: a reader sorted as many rows at a time as have 64 MiB in their files. Here that is all, with 720 MB."""
    append_file(tmp_path / "table", "0.parquet", with_offsets(alike(12_000, 60_000).cast(pa.string())), 12_000)
    rows, peak_kib = run(READ, tmp_path / "table")
    assert rows == 12_000
    assert peak_kib < 500 * 1024


def test_what_values_take_alone_is_counted_at_any_depth() -> None:
    shared = pa.DictionaryArray.from_arrays(pa.array([0, 0, None, 0], pa.int32()), pa.array(["x" * 1000]))
    assert bytes_alone(shared) == 3000
    assert bytes_alone(shared.slice(1, 2)) == 1000
    assert bytes_alone(pa.ListArray.from_arrays(pa.array([0, 1, 4]), shared)) == 3000
    assert bytes_alone(pa.LargeListArray.from_arrays(pa.array([0, 1, 4]), shared)) == 3000
    assert bytes_alone(pa.StructArray.from_arrays([shared, pa.array(range(4))], ["text", "n"])) == 3000 + 4 * 8
    keys = pa.array([b"k" * 10] * 4)
    assert bytes_alone(pa.MapArray.from_arrays(pa.array([0, 4]), keys, shared)) == 3000 + keys.nbytes
    assert bytes_alone(pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array([7]))) > 0, "no texts"
