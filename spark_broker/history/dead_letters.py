"""Records that the topic's table refuses, by a rule that its user has made, go into a table beside it.

Delta refuses a whole append for one row that breaks a rule. So the rows are judged first, and those that would be
refused are left out. The commit says of which offsets some were left out. Then, before the controller records the
commit, these records are appended to the dead-letter table, under the same transaction: once, whoever does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spark_broker.history.design import DEFAULT, GENERATED, TableDesign, quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

REASON = "_offset_refused"
"""The column that `judged` adds. No topic has a column of this name: its beginning is reserved."""


def judged(frame: DataFrame, design: TableDesign) -> DataFrame:
    """The rows with the name of the first rule that each breaks in the column `REASON`; null: it breaks none."""
    from pyspark.sql.functions import coalesce, expr, lit, when

    rows, there = frame, {name.lower() for name in frame.columns}
    missing = [column for column in design.columns if column.name.lower() not in there]
    for column in sorted(missing, key=lambda column: GENERATED in column.metadata):
        # What Delta puts there. A generated column is computed from the others.
        made = column.metadata.get(GENERATED) or column.metadata.get(DEFAULT)
        rows = rows.withColumn(column.name, (expr(made) if made else lit(None)).cast(column.dataType))
    reason = lit(None).cast("string")
    for rule in reversed(design.rules):
        holds = coalesce(expr(rule.condition), lit(False))
        reason = when(~holds, lit(rule.name)).otherwise(reason)
    return rows.select(*(quoted(name) for name in frame.columns), reason.alias(REASON))


def accepted(rows: DataFrame) -> DataFrame:
    """Those of the judged rows that break no rule."""
    return rows.where(f"{REASON} IS NULL").drop(REASON)


def refused(rows: DataFrame) -> DataFrame:
    return rows.where(f"{REASON} IS NOT NULL")


def letters(rows: DataFrame, columns: Sequence[str]) -> DataFrame:
    """The dead-letter table's rows: where each record is in the topic, why it was refused, and itself as JSON.

    `rows`: judged. `columns`: the topic's. JSON stays the same type when the topic's schema changes.
    """
    from pyspark.sql.functions import coalesce, col, current_timestamp, lit, struct, to_json

    record = to_json(struct(*(col(quoted(name)) for name in columns)), {"ignoreNullFields": "false"})
    return rows.select(
        *("_partition", "_offset", "_timestamp", "_leader_epoch"),
        coalesce(REASON, lit("refused by the table")).alias("_reason"),
        current_timestamp().alias("_quarantined_at"),
        record.alias("_record"),
    )
