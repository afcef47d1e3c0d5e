"""Patterns of topic names: what they match, what is refused, and that no pattern can stop the coordinator."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.core.groups.patterns import CACHED_SETS_MAX, LENGTH_MAX, STATES_MAX, Pattern, compile_pattern
from spark_broker.core.groups.records import MemberValue
from spark_broker.core.groups.topics import Topic, Topics
from spark_broker.errors import InvalidRegularExpressionError

atoms = st.sampled_from(["a", "b", "-", ".", "\\.", "[ab]", "[^a]", "[a-c]", "\\d", "\\w", "\\W", "[\\d_]", "()"])


def _compose(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda both: f"({both[0]}|{both[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
    )


patterns = st.recursive(atoms, _compose, max_leaves=8)


@given(patterns, st.text("abc.-_1", max_size=6))
def test_a_pattern_of_the_subset_matches_what_pythons_matches(pattern: str, name: str) -> None:
    assert Pattern(pattern).matches(name) == (re.fullmatch(pattern, name) is not None)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("orders", ["orders"], ["orders-eu", "my-orders", ""]),
        ("orders.*", ["orders", "orders-eu"], ["my-orders"]),
        ("^orders-(eu|us)$", ["orders-eu", "orders-us"], ["orders-", "orders-eu-1"]),
        ("a\\.b\\$", ["a.b$"], ["axb$", "a.b"]),
        ("[]x]", ["]", "x"], ["["]),
        ("[a-]", ["a", "-"], ["b"]),
        ("a|", ["a", ""], ["aa"]),
        ("x{2,3}", ["xx", "xxx"], ["x", "xxxx"]),
    ],
)
def test_a_pattern_matches_whole_names(pattern: str, matching: list[str], others: list[str]) -> None:
    compiled = Pattern(pattern)
    assert [name for name in [*matching, *others] if compiled.matches(name)] == matching


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "a" * (LENGTH_MAX + 1)),
        *("(a", "a)", "[a", "a]", "a}", "a{", "a{,2}", "a{3,2}", "a{101}", "a{1000}", "\\", "a\\"),
        *("(?=a)", "(?!a)", "(?<=a)", "(?P<n>a)", "(?i)a", "(a)\\1", "\\bword", "a^b", "a$b"),
        *("*a", "a**", "a*?", "a++", "a{2}{2}", "[b-a]", "[[:alpha:]]", "[\\D]", "[a-\\d]"),
        *("(" * 40 + "a" + ")" * 40, "(((a{100}){100}){100}){100}", "((()|){100}){100}"),
    ],
)
def test_what_is_beyond_the_subset_is_refused_with_what_to_do(pattern: str) -> None:
    with pytest.raises(InvalidRegularExpressionError, match="-> Use characters, classes"):
        Pattern(pattern)


@pytest.mark.parametrize("pattern", ["(a*)*(a*)*(a|aa)*b", "(a?){60}a{60}", "(a|b)*a(a|b){90}", "((a|a)*|(a|a)+)*c"])
def test_a_pattern_that_would_stop_pythons_has_few_states(pattern: str) -> None:
    """Python's `re` would try more ways than there are atoms. Here a character costs a look at each state at most."""
    compiled = Pattern(pattern)
    assert len(compiled._states.reads) <= STATES_MAX
    for name in ("a" * 249, "ab" * 124, "abbab" * 49):
        compiled.matches(name)
    assert len(compiled._moves) <= CACHED_SETS_MAX


def test_a_pattern_is_compiled_once_for_all_members() -> None:
    assert compile_pattern("orders.*") is compile_pattern("orders.*")


def test_a_subscription_is_names_and_a_pattern_without_internal_topics() -> None:
    names = ("__consumer_offsets", "clicks", "orders", "orders-eu")
    topics = Topics([Topic(name, name, 1) for name in names])

    def read(*named: str, pattern: str = "") -> list[str]:
        return [topic.name for topic in topics.subscribed(MemberValue(named, pattern))]

    assert read("orders", "not there") == ["orders"]
    assert read(pattern=".*") == ["clicks", "orders", "orders-eu"]
    assert read("clicks", pattern="orders.+") == ["clicks", "orders-eu"]
    assert read("__consumer_offsets") == ["__consumer_offsets"]


def test_what_changed_between_two_images_is_told_by_name() -> None:
    before = Topics([Topic("1", "a", 1), Topic("2", "b", 1), Topic("3", "c", 1)])
    after = Topics([Topic("1", "a", 2), Topic("4", "b", 1), Topic("3", "c", 1), Topic("5", "d", 1)])
    assert after.changed_since(before) == {"a", "b", "d"}
    assert Topics().changed_since(before) == {"a", "b", "c"}
