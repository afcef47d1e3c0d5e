"""Delta tables as Spark writes them, without Spark: their files have checksums of their pages."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema, write_deltalake
from deltalake.transaction import AddAction


def append_file(table: Path, name: str, data: pa.Table, row_group_rows: int = 1024) -> Path:
    """Append one file of this name; returns where it is. Creates the table if need be."""
    if not DeltaTable.is_deltatable(str(table)):
        write_deltalake(str(table), data.slice(0, 0))
    file = table / name
    pq.write_table(data, file, write_page_checksum=True, row_group_size=row_group_rows, data_page_size=4096)
    counted = ("_partition", "_offset")
    stats = {
        "numRecords": data.num_rows,
        "minValues": {column: pc.min(data[column]).as_py() for column in counted},
        "maxValues": {column: pc.max(data[column]).as_py() for column in counted},
        "nullCount": dict.fromkeys(counted, 0),
    }
    action = AddAction(name, file.stat().st_size, {}, int(file.stat().st_mtime * 1000), True, json.dumps(stats))
    delta = DeltaTable(str(table))
    delta.create_write_transaction([action], "append", Schema.from_arrow(data.schema))
    return file


def table_id(table: Path) -> str:
    return str(DeltaTable(str(table)).metadata().id)
