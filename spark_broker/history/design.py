"""What a Delta table demands of the rows that are appended to it: types, and rules that its user has made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_broker.errors import TieringStoppedError
from spark_broker.protocol.schema_evolution import widened

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructField, StructType

CONSTRAINT = "delta.constraints."
"""What the name of a table's property begins with that holds a CHECK constraint."""

GENERATED = "delta.generationExpression"
DEFAULT = "CURRENT_DEFAULT"
VARCHAR = "__CHAR_VARCHAR_TYPE_STRING"
"""Names in the metadata of a column: of the expression that computes it, its default, and the length of its text."""

MADE_BY_DELTA = "delta.identity."


@dataclass(frozen=True)
class Rule:
    """What each row must satisfy: an SQL expression that must be true."""

    name: str
    condition: str


@dataclass(frozen=True)
class TableDesign:
    """A table's columns with Delta's own metadata, its properties, and the columns that it is partitioned by."""

    path: str
    columns: tuple[StructField, ...]
    properties: Mapping[str, str]
    partitioned_by: tuple[str, ...]

    @classmethod
    def of(
        cls, path: str, schema: dict[str, Any], properties: Mapping[str, str], partitioned_by: Sequence[str]
    ) -> TableDesign:
        """`schema`: as in Delta's log."""
        from pyspark.sql.types import StructType

        return cls(path, tuple(StructType.fromJson(schema).fields), dict(properties), tuple(partitioned_by))

    def column(self, name: str) -> StructField:
        """The column of this name, whatever its case. Raises KeyError."""
        return {column.name.lower(): column for column in self.columns}[name.lower()]

    @property
    def rules(self) -> list[Rule]:
        """What Delta checks of each row. It refuses a whole append for one row that breaks a rule."""
        rules = [
            Rule(f"CHECK constraint {name.removeprefix(CONSTRAINT)}", expression)
            for name, expression in sorted(self.properties.items())
            if name.startswith(CONSTRAINT)
        ]
        for column in self.columns:
            name = quoted(column.name)
            if not column.nullable:
                rules.append(Rule(f"column {column.name} must not be null", f"{name} IS NOT NULL"))
            if GENERATED in column.metadata:
                rules.append(Rule(f"generated column {column.name}", f"{name} <=> ({column.metadata[GENERATED]})"))
            length = re.search(r"\d+", column.metadata.get(VARCHAR, ""))
            if length is not None:
                rules.append(
                    Rule(f"length of column {column.name}", f"length({name}) <= {length[0]} OR {name} IS NULL")
                )
        return rules

    def check_columns(self, names: Sequence[str]) -> None:
        """Check that rows with these columns can satisfy the rules. Raises TieringStoppedError."""
        there = {name.lower() for name in names}
        for column in self.columns:
            given = column.name.lower() in there or GENERATED in column.metadata or DEFAULT in column.metadata
            if not given and not column.nullable:
                raise TieringStoppedError(
                    f"column {column.name!r} of the table {self.path} must not be null, and the topic lacks it"
                )

    def check_rewrite(self) -> None:
        """Check that nothing of the table is lost when its rows are written anew. Raises TieringStoppedError."""
        for column in self.columns:
            made = any(key in (GENERATED, DEFAULT) or key.startswith(MADE_BY_DELTA) for key in column.metadata)
            if made or not column.nullable:
                raise TieringStoppedError(
                    f"the table {self.path} cannot be written anew: column {column.name!r} would lose that it is "
                    "NOT NULL, generated, or has a default. Widen it yourself, or set delta.type.widening=native"
                )


def wider_columns(design: TableDesign, schema: StructType) -> dict[str, DataType]:
    """The columns of the table that are wider in the topic, by their name in the table, with the type in the topic.

    Raises TieringStoppedError where a type is another one.
    """
    columns = {column.name.lower(): column for column in design.columns}
    wider: dict[str, DataType] = {}
    for field in schema:
        column = columns.get(field.name.lower())
        if column is None or column.dataType.simpleString() == field.dataType.simpleString():
            continue
        if not _widened(column.dataType, field.dataType):
            raise TieringStoppedError(
                f"column {field.name!r} of the table {design.path} is {column.dataType.simpleString()}, "
                f"in the topic it is {field.dataType.simpleString()}"
            )
        wider[column.name] = field.dataType
    return wider


def _widened(narrow: DataType, wide: DataType) -> bool:
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_type

    try:
        return widened(to_arrow_type(narrow, timezone="UTC"), to_arrow_type(wide, timezone="UTC"))
    except PySparkException:
        return False  # A type that no topic has.


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
