"""How the jobs end: a failure of their streams is one, and told in a line. A signal is an end in order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import StreamingQueryException

import jobs.consume
import jobs.produce
import jobs.tier
from jobs.submitted import RECORDS, exit_status, told_in_a_line

READ, WRITTEN = 100, (3, 4, 5)
"""The rows of each micro-batch that Spark reads, and those that a filter lets through."""

RUN = "a run"


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A job keeps its handlers to its end, which is that of its process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@dataclass
class FakeQuery:
    """`ends`: what `awaitTermination` returns or raises, one after the other; a signal comes while it waits."""

    ends: list[bool | BaseException | signal.Signals | tuple[signal.Signals, BaseException]]
    stopped: bool = False
    listeners: list[Any] = field(default_factory=list)
    batches: int = 0

    def started(self) -> FakeQuery:
        self._report("onQueryStarted", SimpleNamespace(runId=RUN))
        return self

    def awaitTermination(self, timeout: float) -> bool:
        assert timeout > 0
        end = self.ends.pop(0)
        if isinstance(end, tuple):
            number, end = end
            signal.raise_signal(number)
            self._report("onQueryTerminated", SimpleNamespace(runId=RUN))
        if isinstance(end, signal.Signals):
            signal.raise_signal(end)
            return False
        if isinstance(end, BaseException):
            raise end
        self._report_batch(RUN, {RECORDS: {RECORDS: WRITTEN[self.batches]}})
        self.batches += 1
        if end:
            self._report("onQueryTerminated", SimpleNamespace(runId=RUN))
        return end

    def stop(self) -> None:
        self.stopped = True
        self._report_batch("another run", {RECORDS: {RECORDS: 1000}})
        self._report_batch(RUN, {})
        self._report("onQueryTerminated", SimpleNamespace(runId=RUN))

    def _report_batch(self, run: str, metrics: dict[str, dict[str, int]]) -> None:
        progress = SimpleNamespace(runId=run, numInputRows=READ, observedMetrics=metrics)
        self._report("onQueryProgress", SimpleNamespace(progress=progress))

    def _report(self, method: str, event: SimpleNamespace) -> None:
        for listener in self.listeners:
            getattr(listener, method)(event)


class Chain:
    """A session, reader, frame and writer: each call returns it again, until `start`."""

    def __init__(self, query: FakeQuery) -> None:
        self._query = query

    def __getattr__(self, name: str) -> Chain:
        return self

    def __call__(self, *_arguments: object, **_options: object) -> Chain:
        return self

    def addListener(self, listener: object) -> None:
        self._query.listeners.append(listener)

    def start(self, *_arguments: object) -> FakeQuery:
        return self._query.started()


def consume(query: FakeQuery, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(jobs.consume, "session", lambda name: nullcontext(Chain(query)))
    monkeypatch.setattr(jobs.consume, "observed", lambda frame: frame)  # Its columns need a JVM.
    return jobs.consume.main(["--bootstrap-servers", "a:1", "--topic", "t", "--checkpoint", "c", "--to", "f"])


def produce(query: FakeQuery, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(jobs.produce, "session", lambda name: nullcontext(Chain(query)))
    monkeypatch.setattr(jobs.produce, "observed", lambda frame: frame)
    given = ["--bootstrap-servers", "a:1", "--topic", "t", "--checkpoint", "c", "--follow", "--schema", "n INT", "d"]
    return jobs.produce.main(given)


Run = Callable[[FakeQuery, pytest.MonkeyPatch], int]
both = pytest.mark.parametrize("run", [consume, produce])


@both
def test_a_query_that_fails_between_two_looks_at_it_fails_the_job(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Story: consume looked whether the query was active. It was not: the job said what it had read, and status 0."""
    assert run(FakeQuery([False, StreamingQueryException("no space is left")]), monkeypatch) == 1
    said = capsys.readouterr()
    assert said.err == "error: no space is left\n"
    assert said.out == ""


@both
def test_all_records_that_are_written_are_counted(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Story: the number was of the rows that Spark had read, before `--where`, and of no more than 100 batches."""
    assert run(FakeQuery([False, True]), monkeypatch) == 0
    assert capsys.readouterr().out.startswith("7 r")


@both
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_query_and_says_how_much_there_was(
    run: Run, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Story: produce ended with a traceback."""
    query = FakeQuery([False, False, number])
    assert run(query, monkeypatch) == 0
    assert query.stopped
    assert capsys.readouterr().out.startswith("7 r")


@both
def test_a_query_that_the_signal_has_ended_is_stopped(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Story: the process that plans a stream's batches got the signal, too. The query failed: its pipe was broken."""
    query = FakeQuery([False, False, (signal.SIGTERM, StreamingQueryException("Broken pipe"))])
    assert run(query, monkeypatch) == 0
    assert capsys.readouterr().out.startswith("7 r")


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_job_that_is_interrupted_says_so_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Story: Ctrl-C while Spark started, or while a table was written, was a traceback out of Py4J."""
    assert exit_status(interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_no_other_topic_is_tiered_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs.tier, "session", lambda *_: nullcontext())
    monkeypatch.setattr(jobs.tier, "tier_topic", interrupted)
    assert jobs.tier.main(["--bootstrap-servers", "a:1", "--topic", "one", "--topic", "other"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@dataclass
class JavaException:
    """As Py4J hands one out."""

    text: str
    cause: JavaException | None = None
    _target_id: str = "o1"

    def toString(self) -> str:
        return self.text

    def getCause(self) -> JavaException | None:
        return self.cause


def test_a_java_exception_is_told_in_a_line_with_its_cause(capsys: pytest.CaptureFixture[str]) -> None:
    """A job that is cancelled, or whose executor is lost. It was pages of a Java stack."""
    lost = JavaException("ExecutorLostFailure: executor 1 exited")
    java = JavaException("org.apache.spark.SparkException: Job aborted due to stage failure\n\tat a.b.C(C.scala)", lost)

    def run() -> None:
        raise Py4JJavaError("An error occurred while calling o1.save.\n", java)

    assert told_in_a_line(run) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "error: org.apache.spark.SparkException: Job aborted due to stage failure "
        "(cause: ExecutorLostFailure: executor 1 exited)"
    )
