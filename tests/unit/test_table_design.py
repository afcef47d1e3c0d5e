"""What a user's table asks of rows, as Delta's log has it."""

from __future__ import annotations

from typing import Any

import pytest

from spark_broker.errors import TieringStoppedError
from spark_broker.history.design import VARCHAR, TableDesign


def design_of(kind: object, declared: str) -> TableDesign:
    field: dict[str, Any] = {"name": "c", "type": kind, "nullable": True, "metadata": {VARCHAR: declared}}
    return TableDesign.of("/lake/t", {"type": "struct", "fields": [field]}, {}, ())


@pytest.mark.parametrize("declared", ["varchar(10)", "char(10)"])
def test_the_length_of_a_text_is_a_rule(declared: str) -> None:
    design = design_of("string", declared)
    design.check_columns(["c"])
    assert [rule.condition for rule in design.rules(["c"])] == ["length(`c`) <= 10 OR `c` IS NULL"]


@pytest.mark.parametrize("declared", ["array<varchar(10)>", "struct<x1:varchar(5)>", "map<string,char(2)>"])
def test_lengths_inside_of_a_column_stop_tiering_and_say_so(declared: str) -> None:
    """Story: the rule was that the array has a length of at most 10, or the struct one of 1. Spark refused it, and the
    reason pointed at nothing that the user had done."""
    design = design_of({"type": "array", "elementType": "string", "containsNull": True}, declared)
    with pytest.raises(TieringStoppedError, match=r"column 'c' of the table /lake/t is .*Make these texts STRING"):
        design.check_columns(["c"])
    assert design.rules(["c"]) == []


def design(*fields: dict[str, Any], **properties: str) -> TableDesign:
    given = [{"nullable": True, "metadata": {}, **field} for field in fields]
    return TableDesign.of("/lake/t", {"type": "struct", "fields": given}, properties, ())


ZIP = {"name": "zip", "type": "string", "nullable": False, "metadata": {}}
INVARIANT = {"delta.invariants": '{"expression":{"expression":"n > 3"}}'}
IDENTITY = {"name": "id", "type": "long", "metadata": {"delta.identity.start": 1, "delta.identity.step": 1}}


@pytest.mark.parametrize(
    ("field", "rules"),
    [
        (
            {"name": "addr", "type": {"type": "struct", "fields": [ZIP]}},
            {"column addr.zip must not be null": "`addr`.`zip` IS NOT NULL"},
        ),
        (
            {
                "name": "list",
                "type": {"type": "array", "elementType": {"type": "struct", "fields": [ZIP]}, "containsNull": True},
            },
            {},  # Delta does not look into arrays.
        ),
        ({"name": "n", "type": "integer", "metadata": INVARIANT}, {"invariant of column n": "n > 3"}),
        ({**IDENTITY, "nullable": False}, {}),
    ],
)
def test_the_rules_are_those_that_delta_enforces(field: dict[str, Any], rules: dict[str, str]) -> None:
    """Story: one record that broke a rule of a nested field stopped tiering for good."""
    found = design(field)
    found.check_columns(["addr", "list", "n"])
    assert {rule.name: rule.condition for rule in found.rules(["addr", "list", "n"])} == rules


def test_a_rule_about_an_identity_column_stops_tiering() -> None:
    """Story: Delta gives it a value, and each record became a dead letter because it has none before."""
    found = design(IDENTITY, **{"delta.constraints.pos": "`ID` > 0"})
    with pytest.raises(TieringStoppedError, match="its identity column 'id'"):
        found.check_columns(["n"])
    found.check_columns(["id"])
