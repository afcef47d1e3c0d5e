"""Damaged messages, frames, schemas and batches: typed errors, and nothing else, in a process that may die of them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from msgspec import inspect as types

from spark_broker.protocol.messages import CallRequest, StreamMessage
from tests.fuzz.planted import BUGS, HANG_SEED, REFUSED_SEED
from tests.fuzz.runner import Outcome, run
from tests.fuzz.samples import message_types, type_info
from tests.fuzz.targets import ALL, MAX_INPUT_BYTES, TARGETS, input_of

SEEDS = 2000
FULL_FIRST_SEED = 1_000_000 * (1 + int(os.environ.get("SEED", "0")))
"""Other inputs every day, as the Makefile gives it: many of them in a month are worth more than the same ones again."""
FULL_SEEDS = {"batch": 4_000}
"""Where an input takes long. A few seconds, as for the others."""
FULL_SEEDS_OF_OTHERS = 10_000

ACCEPTED_SHARE = 0.01
"""At least this share of the inputs must be accepted: cruder damage would only ever try the first check."""


def check(outcome: Outcome) -> None:
    assert outcome.findings == [], "\n".join(map(str, outcome.findings))
    assert outcome.accepted > ACCEPTED_SHARE * outcome.tried


def test_damaged_input_is_refused_with_a_typed_error_or_harmless(tmp_path: Path) -> None:
    outcome = run(ALL, first_seed=0, count=SEEDS, seconds=60, directory=tmp_path)
    assert outcome.tried == SEEDS
    check(outcome)


@pytest.mark.full
@pytest.mark.parametrize("target", sorted(set(TARGETS) - {ALL}))
def test_damaged_input_of_many_seeds_does_no_harm(target: str, tmp_path: Path) -> None:
    count = FULL_SEEDS.get(target, FULL_SEEDS_OF_OTHERS)
    outcome = run(target, first_seed=FULL_FIRST_SEED, count=count, seconds=240, directory=tmp_path)
    assert outcome.tried == count
    check(outcome)


def test_a_change_of_one_of_many_equal_nodes_leaves_the_others() -> None:
    """One list at a thousand places grew everywhere, to 200 MB: msgspec ends a process that runs out of memory."""
    assert len(TARGETS["records"].make(random.Random("records/1023890"))) < 2 * MAX_INPUT_BYTES


def test_planted_bugs_are_found_with_their_seeds_and_inputs_and_nothing_else_is(tmp_path: Path) -> None:
    outcome = run("planted", first_seed=0, count=20, seconds=60, directory=tmp_path)
    assert [finding.seed for finding in outcome.findings] == list(BUGS)
    for finding in outcome.findings:
        assert finding.path.read_bytes() == finding.seed.to_bytes(8, "little")
        assert f"--target planted --seed {finding.seed}" in str(finding)
    said = [finding.what for finding in outcome.findings]
    for what, expected in zip(said, ("KeyError", "Aborted", "InvariantError", "rose by", "MemoryError"), strict=True):
        assert expected in what
    assert outcome.tried == 20
    assert REFUSED_SEED not in {finding.seed for finding in outcome.findings}


@pytest.mark.full
def test_a_planted_hang_is_found_and_the_run_goes_on(tmp_path: Path) -> None:
    outcome = run("planted-hang", first_seed=0, count=5, seconds=60, directory=tmp_path)
    (finding,) = outcome.findings
    assert finding.seed == HANG_SEED
    assert "Timeout" in finding.what
    assert outcome.tried == 5


def test_a_seed_makes_the_same_input_every_time() -> None:
    for target in TARGETS:
        assert input_of(target, 7) == input_of(target, 7)
        assert len({input_of(target, seed) for seed in range(20)}) > 15


def test_every_message_that_a_server_decodes_is_fuzzed() -> None:
    decoded = {*CallRequest.__args__, *StreamMessage.__args__}
    assert {kind.__name__ for kind in decoded} <= {kind.__name__ for kind in message_types()}


def test_every_collection_and_text_in_a_request_is_bounded() -> None:
    """A hostile length must fail in the decoder, before anything of that size is made."""
    unbounded = [path for kind in CallRequest.__args__ for path in _unbounded(type_info(kind), kind.__name__)]
    assert unbounded == []


def test_every_integer_of_a_message_has_a_range() -> None:
    """Story: a heartbeat's number of 2**63 came back in an answer that nobody could decode."""
    endless = [path for kind in message_types() for path in _endless(type_info(kind), kind.__name__)]
    assert [path for path in endless if not path.endswith(_ONLY_COMPARED)] == []


def _endless(kind: types.Type, path: str) -> list[str]:
    paths = [path] if isinstance(kind, types.IntType) and (kind.ge is None or kind.le is None) else []
    return paths + [child_path for name, child in _inner(kind, path) for child_path in _endless(child, name)]


_ONLY_COMPARED = (".device", ".inode")
"""Up to 2**64 - 1, where msgpack ends. msgspec takes no such bound."""

_COLLECTIONS = (types.ListType, types.VarTupleType, types.DictType, types.StrType, types.BytesType)


def _unbounded(kind: types.Type, path: str) -> list[str]:
    paths = [path] if isinstance(kind, _COLLECTIONS) and kind.max_length is None else []
    return paths + [child_path for name, child in _inner(kind, path) for child_path in _unbounded(child, name)]


def _inner(kind: types.Type, path: str) -> list[tuple[str, types.Type]]:
    """What a type consists of, with its place."""
    inner: list[tuple[str, types.Type]] = []
    if isinstance(kind, types.StructType):
        inner = [(f"{path}.{field.name}", field.type) for field in kind.fields]
    elif isinstance(kind, types.UnionType):
        inner = [(path, member) for member in kind.types]
    elif isinstance(kind, types.TupleType):
        inner = [(f"{path}[{at}]", item) for at, item in enumerate(kind.item_types)]
    elif isinstance(kind, types.DictType):
        inner = [(f"{path} key", kind.key_type), (f"{path} value", kind.value_type)]
    elif isinstance(kind, types.ListType | types.VarTupleType):
        inner = [(f"{path}[]", kind.item_type)]
    return inner
