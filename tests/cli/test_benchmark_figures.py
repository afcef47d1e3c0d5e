"""What the benchmarks make of their measurements. No time is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.clients import ClientsFigures
from benchmarks.failover import FAULTS, Distribution, FaultFigures, longest_gap_within_s
from benchmarks.figures import DOCUMENT, Figure, marks, write
from benchmarks.groups import GroupFigures, measure_groups
from benchmarks.run import NAMES, Report, SendFigures, arguments, summary
from spark_broker.cli.measure import Latency, ProduceFigures
from spark_broker.errors import InvalidDataError


def test_figures_replace_those_in_the_document_and_nothing_else(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    (begin, end), other = marks("latency"), "\n".join(marks("start"))
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n{other}\n")
    for _ in range(2):
        write([Figure("appends", "5 a second", "6")], "here", "latency", document)
    text = "Measured here.\n\n| Measured | Result | Goal |\n|---|---|---|\n| appends | 5 a second | 6 |"
    assert document.read_text() == f"before\n{begin}\n{text}\n{end}\nafter\n{other}\n"


def test_a_document_without_a_place_for_figures_is_left_alone(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text("text\n")
    with pytest.raises(InvalidDataError, match="no lines"):
        write([], "here", "latency", document)
    assert document.read_text() == "text\n"


@pytest.mark.parametrize("section", [*NAMES, "failover-busy", "kafka"])
def test_the_document_has_one_place_for_the_figures_of_each_measurement(section: str) -> None:
    begin, end = marks(section)
    assert DOCUMENT.read_text().count(begin) == DOCUMENT.read_text().count(end) == 1


def test_a_gap_counts_from_the_start_and_to_the_end_of_the_time() -> None:
    """A partition that is never acknowledged again has no second acknowledgement: its gap must show all the same."""
    times = [1.0, 2.0, 2.5, 9.0]
    assert longest_gap_within_s(times, 0.5, 3.0) == 1.0
    assert longest_gap_within_s(times, 2.25, 8.0) == 5.5
    assert longest_gap_within_s([], 2.0, 8.0) == 6.0


def test_a_distribution_shows_its_tail() -> None:
    gaps = [*range(40, 139), 4000]

    shown = Distribution.of(gaps)

    assert (shown.count, shown.median, shown.p90, shown.p99, shown.longest) == (100, 89.5, 129, 138, 4000)
    assert shown.buckets == {
        "0-50 ms": 10,
        "50-100 ms": 50,
        "100-250 ms": 39,
        "250-500 ms": 0,
        "500-1000 ms": 0,
        "over 1000 ms": 1,
    }
    assert "over 1000 ms: 1" in str(shown)


def test_each_kind_of_fault_is_a_line_and_those_beside_busy_processes_are_others() -> None:
    faults = [FaultFigures(name, 0, 2, 100, 5.0, number % 2, 1) for number, name in enumerate(FAULTS)]
    report = Report("machine", "local", faults=faults, busy_faults=faults[:1])

    sections = summary(report, arguments(["--busy", "4"]))

    assert list(sections) == ["failover", "failover-busy"]
    figures = sections["failover"]
    assert len(figures) == len(FAULTS)
    assert [figure.name.endswith("beside 4 busy processes") for figure in figures + sections["failover-busy"]] == [
        *[False] * len(FAULTS),
        True,
    ]
    assert "others restarted: 1" in figures[1].result
    assert "elections: 1" in figures[3].result


def test_sends_with_keys_and_without_are_two_lines() -> None:
    runs = [SendFigures(keyed, 10, 1.0, speed) for keyed in (False, True) for speed in (30, 10, 20 + keyed)]
    figures = summary(Report("machine", "local", send=runs), arguments([]))["throughput"]
    assert [(figure.result, figure.goal) for figure in figures] == [
        ("median 20 records/s, 10 to 30 over 3", "250,000 records/s"),
        ("median 21 records/s, 10 to 30 over 3", ""),
    ]
    assert ["with keys" in figure.name for figure in figures] == [False, True]


def test_what_idle_clients_cost_and_what_a_new_one_waits_are_two_lines() -> None:
    clients = ClientsFigures(200, [1.0, 2.5, 3.0], 40.0, 100, 10.0, 30.0, 45.0)
    cost, wait = summary(Report("machine", "local", clients=clients), arguments([]))["clients"]
    assert (cost.result, cost.goal) == ("1.0, 2.5, 3.0 % of a core; 40.0 %", "under 5 % for each broker")
    assert (wait.result, wait.goal) == ("median 10.0 ms, p99 30.0, longest 45.0 over 100", "p99 under 50 ms")


def test_rebalances_of_a_group_are_measured_to_the_end() -> None:
    found = measure_groups(members=3, partitions=7, run_s=0.0)
    assert (found.members, found.partitions, len(found.rebalances_per_s)) == (3, 7, 5)
    report = Report("machine", "local", groups=GroupFigures(20, 200, [5.0, 4.0, 9.0], 74.5, 3900))
    (figure,) = summary(report, arguments([]))["groups"]
    assert "20 members and 200 partitions" in figure.name
    assert figure.result.startswith("median 5 a second and core, 4 to 9 over 3; each 74 heartbeats and 3,900 bytes")


def test_only_what_was_measured_is_reported_and_the_median_counts() -> None:
    latency = Latency(1, 1.0, 1.0, 2.0, 2.0, 2.0)
    runs = [ProduceFigures(10, 1, 1.0, speed, 1.0, 0, latency) for speed in (30, 10, 20)]
    report = Report("machine", "local", produce_acks_all=runs)
    sections = summary(report, arguments(["--batch-records", "5"]))
    assert list(sections) == ["throughput"]
    (figure,) = sections["throughput"]
    assert figure.result == "20 records/s"
    assert "acks=all, RF 3" in figure.name
    assert "batches of 5" in figure.name
