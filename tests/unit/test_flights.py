"""The demo's data has the types that it declares, and parsing loses nothing."""

from __future__ import annotations

import sys

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from jobs import flights
from spark_broker.errors import MissingDependencyError
from spark_broker.protocol.schema import normalize_schema


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return flights.read_flights()


def test_all_flights_are_read_with_all_columns(table: pa.Table) -> None:
    assert (table.num_rows, table.num_columns) == (336_776, 19)
    assert table.schema.equals(flights.SCHEMA)


def test_the_schema_is_stored_as_it_is() -> None:
    assert normalize_schema(flights.SCHEMA).equals(flights.SCHEMA)


def test_the_first_row_has_the_values_of_the_file(table: pa.Table) -> None:
    row = table.slice(0, 1).to_pylist()[0]
    assert row["time_hour"].isoformat() == "2013-01-01T10:00:00+00:00"
    assert {name: value for name, value in row.items() if name != "time_hour"} == {
        "year": 2013,
        "month": 1,
        "day": 1,
        "dep_time": 517,
        "sched_dep_time": 515,
        "dep_delay": 2,
        "arr_time": 830,
        "sched_arr_time": 819,
        "arr_delay": 11,
        "carrier": "UA",
        "flight": 1545,
        "tailnum": "N14228",
        "origin": "EWR",
        "dest": "IAH",
        "air_time": 227,
        "distance": 1400,
        "hour": 5,
        "minute": 15,
    }


def test_what_is_not_available_is_null_in_every_type(table: pa.Table) -> None:
    nulls = {name: table[name].null_count for name in table.schema.names if table[name].null_count}
    assert nulls == {
        "dep_time": 8255,
        "dep_delay": 8255,
        "arr_time": 8713,
        "arr_delay": 9430,
        "tailnum": 2512,
        "air_time": 9430,
    }


def test_every_row_has_a_key(table: pa.Table) -> None:
    assert table[flights.KEY].null_count == 0
    assert pc.count_distinct(table[flights.KEY]).as_py() == 105


def test_fewer_rows_are_the_first_ones(table: pa.Table) -> None:
    assert flights.read_flights(1000).equals(table.slice(0, 1000))


def test_a_value_of_a_wrong_type_is_not_read_as_null() -> None:
    header = ",".join(flights.SCHEMA.names)
    row = "2013,1,1,noon,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z"
    with pytest.raises(pa.ArrowInvalid, match="noon"):
        flights.parse_flights(pa.BufferReader(f"{header}\n{row}\n".encode()))


def test_the_package_is_found_and_not_imported() -> None:
    assert flights.archive_path().is_file()
    assert flights.PACKAGE not in sys.modules


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "PACKAGE", "no_such_package_of_flights")
    with pytest.raises(MissingDependencyError, match="pip install"):
        flights.read_flights()
