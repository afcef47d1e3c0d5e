"""Records that the topic's table refuses, by a rule that its user has made, go into a table beside it.

Delta refuses a whole append for one row that breaks a rule. So the rows are judged first, and those that would be
refused are left out. The commit says of which offsets some were left out. Then, before the controller records the
commit, these records are appended to the dead-letter table, under the same transaction: once, whoever does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spark_broker.errors import TieringStoppedError
from spark_broker.history.design import DEFAULT, GENERATED, NULL_TEXTS, TableDesign, quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

REASON = "_offset_refused"
"""The column that `judged` adds. No topic has a column of this name: its beginning is reserved."""

_AS_JSON = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""Spark's own formats leave the microseconds out."""

_GIVEN = "_offset_given_"
"""What the names of columns begin with that hold what the record has, where rules are judged by something else."""


def judged(frame: DataFrame, design: TableDesign) -> DataFrame:
    """The rows with the name of the first rule that each breaks in the column `REASON`; null: it breaks none."""
    from pyspark.sql.functions import coalesce, col, expr, lit, when

    rows = _completed(frame, design)
    given = {name.lower(): f"{_GIVEN}{number}" for number, name in enumerate(design.texts_in_paths)}
    for name, kept in given.items():  # Delta judges what it stores.
        stored = expr(f"CASE WHEN {quoted(name)} NOT IN ({NULL_TEXTS}) THEN {quoted(name)} END")
        rows = rows.withColumn(kept, col(quoted(name))).withColumn(name, stored)
    reason = lit(None).cast("string")
    for rule in reversed(design.rules(frame.columns)):
        holds = coalesce(expr(rule.condition), lit(False))
        reason = when(~holds, lit(rule.name)).otherwise(reason)
    columns = (col(given.get(name.lower(), quoted(name))).alias(name) for name in frame.columns)
    return rows.select(*columns, reason.alias(REASON))


def _completed(frame: DataFrame, design: TableDesign) -> DataFrame:
    """With the table's other columns, and in them what Delta puts there."""
    from pyspark.sql.functions import expr, lit

    rows, there = frame, {name.lower() for name in frame.columns}
    missing = [column for column in design.columns if column.name.lower() not in there]
    for column in sorted(missing, key=lambda column: GENERATED in column.metadata):
        # A generated column is computed from the others.
        made = column.metadata.get(GENERATED) or column.metadata.get(DEFAULT)
        rows = rows.withColumn(column.name, (expr(made) if made else lit(None)).cast(column.dataType))
    return rows


def accepted(rows: DataFrame) -> DataFrame:
    """Those of the judged rows that break no rule."""
    return rows.where(f"{REASON} IS NULL").drop(REASON)


def count_refused(rows: DataFrame, design: TableDesign, columns: Sequence[str]) -> int:
    """How many of the judged rows break a rule. Raises TieringStoppedError where one that does not would be changed.

    `columns`: those that the rows had before they were judged.
    """
    from pyspark.sql.functions import expr
    from pyspark.sql.functions import min as least

    kept = design.kept(columns)
    changed = (
        least(expr(f"CASE WHEN {REASON} IS NULL AND NOT ({each.holds}) THEN struct(_partition, _offset) END"))
        for each in kept
    )
    count, *first = _completed(rows, design).agg(expr(f"count_if({REASON} IS NOT NULL)"), *changed).collect()[0]
    for each, place in zip(kept, first, strict=True):
        if place is not None:
            raise TieringStoppedError(
                f"column {each.name!r} of the table {design.path} cannot hold what the record at offset {place[1]} of "
                f"partition {place[0]} has there: {each.why}. Give the table a CHECK constraint that refuses such "
                "records, so that they become dead letters; or, if nothing of the topic was ever in a table, set "
                "delta.path to one that is made otherwise"
            )
    return int(count)


def letters(rows: DataFrame, columns: Sequence[str]) -> DataFrame:
    """The dead-letter table's rows: where each record is in the topic, why it was refused, and itself as JSON.

    `rows`: judged. `columns`: the topic's. JSON stays the same type when the topic's schema changes.
    """
    from pyspark.sql.functions import coalesce, col, current_timestamp, lit, struct, to_json

    fields = rows.select(*(quoted(name) for name in columns)).schema
    values = (_with_entries(col(quoted(name)), field.dataType) for name, field in zip(columns, fields, strict=True))
    named = (value.alias(name) for name, value in zip(columns, values, strict=True))
    record = to_json(struct(*named), _AS_JSON)
    return rows.select(
        *("_partition", "_offset", "_timestamp", "_leader_epoch"),
        coalesce(REASON, lit("refused by the table")).alias("_reason"),
        current_timestamp().alias("_quarantined_at"),
        record.alias("_record"),
    )


def _with_entries(value: Column, kind: DataType) -> Column:
    """The value with each map whose keys are no names of JSON as the list of its entries, at any depth.

    Spark writes such a key as its address in memory (bytes) or as a number (times).
    """
    from pyspark.sql.functions import map_entries, struct, transform, transform_values, when
    from pyspark.sql.types import ArrayType, MapType, StructType

    if not _has_entries(kind):
        return value
    if isinstance(kind, StructType):
        fields = (_with_entries(value[field.name], field.dataType).alias(field.name) for field in kind)
        return when(value.isNotNull(), struct(*fields))
    if isinstance(kind, ArrayType):
        return transform(value, lambda each: _with_entries(each, kind.elementType))
    if isinstance(kind, MapType):
        if _is_name(kind.keyType):
            return transform_values(value, lambda _, held: _with_entries(held, kind.valueType))
        parts = (("key", kind.keyType), ("value", kind.valueType))
        return transform(
            map_entries(value),
            lambda each: struct(*(_with_entries(each[name], of).alias(name) for name, of in parts)),
        )
    return value


def _has_entries(kind: DataType) -> bool:
    """Whether a map in it has keys that are no names of JSON."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(kind, StructType):
        return any(_has_entries(field.dataType) for field in kind)
    if isinstance(kind, ArrayType):
        return _has_entries(kind.elementType)
    return isinstance(kind, MapType) and (not _is_name(kind.keyType) or _has_entries(kind.valueType))


def _is_name(kind: DataType) -> bool:
    """Whether its values, as keys of a map, are names in JSON that say what they were."""
    from pyspark.sql.types import BooleanType, NumericType, StringType

    return isinstance(kind, StringType | BooleanType | NumericType)
