"""When the cluster tiers which topic."""

from __future__ import annotations

from spark_broker.history.timetable import RunKind, Timetable

WHOLE_MS = 300_000
MINUTE_MS = 60_000


def run_for(table: Timetable, until_ms: int, takes_ms: int = 0) -> list[tuple[int, str, RunKind]]:
    """What runs, and when, if each run takes so long."""
    ran, now_ms = [], 0
    while now_ms < until_ms:
        for topic, kind in table.due(now_ms):
            ran.append((now_ms, topic, kind))
            table.ran(topic, kind, now_ms)
            now_ms += takes_ms
        now_ms += max(1, table.wait_ms(now_ms, 5000))
    return ran


def test_records_are_due_every_minute_and_the_whole_every_five() -> None:
    table = Timetable(WHOLE_MS)
    table.show({"t": MINUTE_MS}, 0)
    ran = run_for(table, 700_000)
    assert [at_ms for at_ms, _, _ in ran] == list(range(MINUTE_MS, 700_000, MINUTE_MS))
    assert [at_ms for at_ms, _, kind in ran if kind is RunKind.WHOLE] == [300_000, 600_000]


def test_a_topic_that_waits_for_sealed_segments_has_whole_runs_alone() -> None:
    table = Timetable(WHOLE_MS)
    table.show({"t": -1}, 0)
    assert run_for(table, 700_000) == [(300_000, "t", RunKind.WHOLE), (600_000, "t", RunKind.WHOLE)]


def test_a_new_topic_begins_when_it_is_seen_and_one_that_is_gone_is_forgotten() -> None:
    table = Timetable(WHOLE_MS)
    table.show({"old": MINUTE_MS}, 0)
    table.show({"old": MINUTE_MS, "new": MINUTE_MS}, 50_000)
    assert table.due(MINUTE_MS) == [("old", RunKind.RECORDS)]
    assert table.next_ms("new") == 110_000
    table.show({"new": 1000}, 60_000)
    assert table.due(10**9) == [("new", RunKind.WHOLE)]
    assert table.next_ms("new") == 51_000, "a shorter interval counts at once"
    table.ran("old", RunKind.WHOLE, 60_000)  # its run ended after it was deleted


def test_no_topic_starves_where_runs_take_longer_than_the_interval() -> None:
    table = Timetable(WHOLE_MS)
    table.show({f"t{n}": 1000 for n in range(5)}, 0)
    ran = [topic for _, topic, _ in run_for(table, 100_000, takes_ms=900)]
    assert max(ran.count(topic) for topic in set(ran)) - min(ran.count(topic) for topic in set(ran)) <= 1
    assert len(set(ran)) == 5


def test_it_waits_until_something_is_due_and_looks_for_topics_meanwhile() -> None:
    table = Timetable(WHOLE_MS)
    assert table.wait_ms(0, 5000) == 5000
    table.show({"t": 2000}, 0)
    assert table.wait_ms(500, 5000) == 1500
    assert table.wait_ms(9000, 5000) == 0
