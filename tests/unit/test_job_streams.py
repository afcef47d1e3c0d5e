"""How the jobs end: a failure of their streams is one, and told in a line. Ctrl-C is an end in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import StreamingQueryException

import jobs.consume
import jobs.produce
from jobs.submitted import told_in_a_line

BATCHES = [SimpleNamespace(batchId=0, numInputRows=3), SimpleNamespace(batchId=1, numInputRows=4)]


@dataclass
class FakeQuery:
    """`ends`: what `awaitTermination` returns or raises, one after the other."""

    ends: list[bool | BaseException]
    active: bool = True
    stopped: bool = False
    recentProgress: list[SimpleNamespace] = field(default_factory=list)  # noqa: N815 - Spark's name

    @property
    def isActive(self) -> bool:
        was, self.active = self.active, False
        return was

    def awaitTermination(self, timeout: float) -> bool:
        assert timeout > 0
        end = self.ends.pop(0)
        if isinstance(end, BaseException):
            raise end
        self.recentProgress = BATCHES[: len(self.recentProgress) + 1]
        return end

    def stop(self) -> None:
        self.stopped = True


class Chain:
    """A session, reader, frame and writer: each call returns it again, until `start`."""

    def __init__(self, query: FakeQuery) -> None:
        self._query = query

    def __getattr__(self, name: str) -> Chain:
        return self

    def __call__(self, *_arguments: object, **_options: object) -> Chain:
        return self

    def start(self, *_arguments: object) -> FakeQuery:
        return self._query


def consume(query: FakeQuery, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(jobs.consume, "session", lambda name: nullcontext(Chain(query)))
    return jobs.consume.main(["--bootstrap-servers", "a:1", "--topic", "t", "--checkpoint", "c", "--to", "f"])


def produce(query: FakeQuery, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(jobs.produce, "session", lambda name: nullcontext(Chain(query)))
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
def test_all_records_are_counted(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(FakeQuery([False, True]), monkeypatch) == 0
    assert capsys.readouterr().out.startswith("7 r")


@both
def test_ctrl_c_stops_the_query_and_says_how_much_there_was(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Story: produce ended with a traceback."""
    query = FakeQuery([False, False, KeyboardInterrupt()])
    assert run(query, monkeypatch) == 0
    assert query.stopped
    assert capsys.readouterr().out.startswith("7 r")


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
