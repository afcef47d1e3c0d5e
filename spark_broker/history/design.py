"""What a Delta table demands of the rows that are appended to it: types, and rules that its user has made."""

from __future__ import annotations

import json
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
INVARIANT = "delta.invariants"

NULL_TEXTS = "'', '__HIVE_DEFAULT_PARTITION__'"
"""In a partition column, these texts are read back as null. (If it is NOT NULL, the table cannot be read then.)"""


NAME_MAX_BYTES = 255
"""Of a directory, in the file systems of Linux and in HDFS. A value of a partition column is a part of such a name."""

WITH_NAMES = re.compile(r"(?!\w[\w+.-]*:)|(file|hdfs|viewfs|webhdfs):")
"""How the path of a table begins whose store has directories with names of their own. An object store has none."""

ESCAPED = r"[\x01-\x1f\x22#%\x27*/:=?\\\x7f{\[\]^]"
"""Characters that are three in such a name: `%2F`. A regular expression of Python's and Java's."""


@dataclass(frozen=True)
class Rule:
    """What each row must satisfy: an SQL expression that must be true."""

    name: str
    condition: str


@dataclass(frozen=True)
class Kept:
    """What a column's value must satisfy so that the table has it as it is. `why`: what Delta does with others."""

    name: str
    holds: str
    why: str


def _kept_in_path(column: StructField) -> Kept | None:
    """For a column that the table is partitioned by: its values are texts in Delta's log."""
    from pyspark.sql.types import BinaryType, StringType, TimestampNTZType, TimestampType

    name, kind = quoted(column.name), column.dataType
    if isinstance(kind, StringType):
        return Kept(column.name, f"{name} NOT IN ({NULL_TEXTS})", _AS_NULL)
    if isinstance(kind, BinaryType):
        text = f"CAST({name} AS STRING)"
        holds = f"is_valid_utf8({text}) AND {text} NOT IN ({NULL_TEXTS})"
        return Kept(column.name, holds, f"{_AS_NULL}, and other bytes than UTF-8 come back changed")
    if isinstance(kind, TimestampType | TimestampNTZType):
        holds = f"{name} >= TIMESTAMP_NTZ '0001-01-01 00:00:00'"
        return Kept(column.name, holds, "a partition column takes a year before 1 for one after it")
    return None


def _kept_with_length(column: StructField) -> Kept | None:
    char = re.fullmatch(r"char\((\d+)\)", column.metadata.get(VARCHAR, ""), re.IGNORECASE)
    if char is None:
        return None
    holds = f"length({quoted(column.name)}) >= {char[1]}"
    return Kept(column.name, holds, f"CHAR({char[1]}) fills shorter texts with spaces")


_LENGTH = re.compile(r"(?:var)?char\((\d+)\)", re.IGNORECASE)

_AS_NULL = f"a partition column has {NULL_TEXTS} as null"


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

    def rules(self, names: Sequence[str]) -> list[Rule]:
        """What Delta checks of each row. It refuses a whole append for one row that breaks a rule.

        `names`: the columns that the rows have. A generated column that they lack is computed, and not checked.
        """
        there = {name.lower() for name in names}
        rules = [
            Rule(f"CHECK constraint {name.removeprefix(CONSTRAINT)}", expression)
            for name, expression in sorted(self.properties.items())
            if name.startswith(CONSTRAINT)
        ]
        for column in self.columns:
            name = quoted(column.name)
            if column.name.lower() in there or not _is_identity(column):
                rules += _rules_within(column, "", "")
            if GENERATED in column.metadata and column.name.lower() in there:
                rules.append(Rule(f"generated column {column.name}", f"{name} <=> ({column.metadata[GENERATED]})"))
            length = _LENGTH.fullmatch(column.metadata.get(VARCHAR, ""))
            if length is not None:
                rules.append(
                    Rule(f"length of column {column.name}", f"length({name}) <= {length[1]} OR {name} IS NULL")
                )
        return rules

    @property
    def texts_in_paths(self) -> list[str]:
        """Columns of text that the table is partitioned by. Delta stores `NULL_TEXTS` there as null."""
        from pyspark.sql.types import StringType

        return [name for name in self.partitioned_by if isinstance(self.column(name).dataType, StringType)]

    def kept(self, names: Sequence[str]) -> list[Kept]:
        """What each row needs so that it is read back as it was. Delta checks none of it.

        `names`: the columns that the rows have.
        """
        there = {name.lower() for name in names}
        kept = [_kept_in_path(self.column(name)) for name in self.partitioned_by]
        kept += [_kept_with_length(column) for column in self.columns]
        return [each for each in kept if each is not None and each.name.lower() in there] + self._fit_into_names()

    def _fit_into_names(self) -> list[Kept]:
        """Of columns that the table is partitioned by, also by what it computes. A longer value fails each append."""
        from pyspark.sql.types import BinaryType, StringType

        has_random_names = (
            self.properties.get("delta.randomizeFilePrefixes", "false").lower() == "true"
            or self.properties.get("delta.columnMapping.mode", "none").lower() != "none"
        )
        if has_random_names or not WITH_NAMES.match(self.path):
            return []
        fit = []
        for column in map(self.column, self.partitioned_by):
            if isinstance(column.dataType, StringType | BinaryType):
                room = NAME_MAX_BYTES - len(re.sub(ESCAPED, "%00", column.name).encode()) - len("=")
                text = f"regexp_replace(CAST({quoted(column.name)} AS STRING), r'{ESCAPED}', '%00')"
                why = f"it is a part of a directory's name, with {room} bytes at most"
                fit.append(Kept(column.name, f"octet_length({text}) <= {room}", why))
        return fit

    @property
    def holds_local_times(self) -> bool:
        from pyspark.sql.types import StructType

        return holds_local_times(StructType(list(self.columns)))

    def makes(self, name: str) -> bool:
        """Whether Delta gives the column a value where rows lack it."""
        column = self.column(name)
        return GENERATED in column.metadata or DEFAULT in column.metadata or _is_identity(column)

    def settable(self, names: Sequence[str]) -> list[str]:
        """Those of these columns that rows may have: Delta itself gives identity columns their values."""
        return [name for name in names if not _is_identity(self.column(name))]

    def check_columns(self, names: Sequence[str]) -> None:
        """Check that rows with these columns can satisfy the rules. Raises TieringStoppedError."""
        there = {name.lower() for name in names}
        for column in self.columns:
            if column.name.lower() not in there and _is_identity(column):
                self._check_unjudged(column)
            given = column.name.lower() in there or self.makes(column.name)
            if not given and not column.nullable:
                raise TieringStoppedError(
                    f"column {column.name!r} of the table {self.path} must not be null, and the topic lacks it"
                )
            if VARCHAR in column.metadata and not _LENGTH.fullmatch(column.metadata[VARCHAR]):
                raise TieringStoppedError(
                    f"column {column.name!r} of the table {self.path} is {column.metadata[VARCHAR]}: lengths of texts "
                    "inside of arrays, maps and structs are not checked here. Make these texts STRING"
                )

    def _check_unjudged(self, column: StructField) -> None:
        """Delta gives an identity column its values as it writes. Before that, no rule about them can be judged."""
        for name, expression in self.properties.items():
            if name.startswith(CONSTRAINT) and re.search(rf"(?i)\b{re.escape(column.name)}\b", expression):
                raise TieringStoppedError(
                    f"the CHECK constraint {name.removeprefix(CONSTRAINT)} of the table {self.path} is about its "
                    f"identity column {column.name!r}, and cannot be judged before the rows are written. Drop it"
                )

    def check_rewrite(self) -> None:
        """Check that nothing of the table is lost when its rows are written anew. Raises TieringStoppedError."""
        for column in self.columns:
            if self.makes(column.name) or not column.nullable:
                raise TieringStoppedError(
                    f"the table {self.path} cannot be written anew: column {column.name!r} would lose that it is "
                    "NOT NULL, generated, or has a default. Widen it yourself, or set delta.type.widening=native"
                )


def _is_identity(column: StructField) -> bool:
    return any(key.startswith(MADE_BY_DELTA) for key in column.metadata)


def _rules_within(column: StructField, path: str, shown: str) -> list[Rule]:
    """What Delta checks of a column and of the fields of structs in it, but not within arrays and maps."""
    from pyspark.sql.types import StructType

    path, shown = f"{path}{quoted(column.name)}", f"{shown}{column.name}"
    rules = []
    if not column.nullable:
        rules.append(Rule(f"column {shown} must not be null", f"{path} IS NOT NULL"))
    elif INVARIANT in column.metadata:
        rules.append(Rule(f"invariant of column {shown}", _expression_of(column.metadata[INVARIANT])))
    if isinstance(column.dataType, StructType):
        for field in column.dataType:
            rules += _rules_within(field, f"{path}.", f"{shown}.")
    return rules


def _expression_of(invariant: str) -> str:
    return str(json.loads(invariant)["expression"]["expression"])


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


def holds_local_times(kind: DataType) -> bool:
    """Whether a time without a zone is anywhere in the type."""
    from pyspark.sql.types import ArrayType, MapType, StructType, TimestampNTZType

    match kind:
        case StructType():
            return any(holds_local_times(field.dataType) for field in kind)
        case ArrayType():
            return holds_local_times(kind.elementType)
        case MapType():
            return holds_local_times(kind.keyType) or holds_local_times(kind.valueType)
        case _:
            return isinstance(kind, TimestampNTZType)


def _widened(narrow: DataType, wide: DataType) -> bool:
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_type

    try:
        return widened(to_arrow_type(narrow, timezone="UTC"), to_arrow_type(wide, timezone="UTC"))
    except PySparkException:
        return False  # A type that no topic has.


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
