"""A command whose standard streams are closed or full, or whose reader has left."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys

import pyarrow as pa
import pytest

from spark_broker.cli.streams import Output
from spark_broker.protocol.schema import DEFAULT_SCHEMA
from tests.client.fake_broker import FakeCluster

PAGE = "docs configuration"
"""It prints more than a pipe or a buffer holds."""


def run(arguments: str, redirection: str, *, unbuffered: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""}
    command = f"set -o pipefail; {sys.executable} -m spark_broker.cli.main {arguments} {redirection}"
    return subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("arguments", ["--version", "--help", PAGE])
def test_an_output_that_is_full_is_an_error_of_one_line(arguments: str, unbuffered: bool) -> None:
    """Story: a command on a full disk was a traceback."""
    done = run(arguments, "> /dev/full", unbuffered=unbuffered)
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("arguments", ["--version", PAGE])
def test_an_output_that_is_closed_is_an_error_of_one_line(arguments: str) -> None:
    done = run(arguments, ">&-")
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: it is closed\n")


@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_reader_that_has_left_is_no_error_to_tell(unbuffered: bool) -> None:
    done = run(PAGE, "| head -1", unbuffered=unbuffered)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


def test_an_input_that_is_closed_is_empty_and_errors_may_go_nowhere() -> None:
    done = run("produce t -b 127.0.0.1:1", "<&-")
    assert "Traceback" not in done.stderr
    done = run("--version", "2>&-")
    assert done.returncode == 0
    assert done.stdout.startswith("spark-broker")


def test_an_output_that_does_not_block_may_be_full_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: a pipe with O_NONBLOCK whose reader was slow was "Resource temporarily unavailable"."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, bytes(4096)):
            pass
    waits: list[object] = []

    def room_comes(_read: object, write: object, _other: object) -> None:
        waits.append(write)
        os.read(reader, 8192)

    monkeypatch.setattr("select.select", room_comes)
    assert Output(writer).write(b"text") == 4
    assert waits == [[writer]]
    os.close(reader)
    os.close(writer)


def test_a_question_waits_for_its_answer_where_the_terminal_does_not_block(cluster: FakeCluster) -> None:
    """Story: another process had set O_NONBLOCK on the terminal. The question was over before it could be answered."""
    cluster.create("t")
    ours, theirs = pty.openpty()
    os.set_blocking(theirs, False)
    command = [sys.executable, "-m", "spark_broker.cli.main", "topics", "delete", "t", "-b", cluster.bootstrap]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        asked = b""
        while b"[y/N]" not in asked:
            asked += os.read(ours, 1024)
        assert os.get_blocking(theirs), "else the answer would have to be there already"
        os.write(ours, b"y\n")
        assert process.wait(60) == 0
    assert not os.get_blocking(theirs)
    assert cluster.topics == {}
    os.close(theirs)
    os.close(ours)


def in_encoding(encoding: str, *arguments: str) -> bytes:
    """What the command prints on a terminal of this encoding. There is no error."""
    command = [sys.executable, "-m", "spark_broker.cli.main", *arguments]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "town"),
    [
        ("iso-8859-1", b"\\u0141\xf3d\\u017a"),
        pytest.param("ascii", b"\\u0141\\xf3d\\u017a", marks=pytest.mark.full),
        pytest.param("utf-8", "Łódź".encode(), marks=pytest.mark.full),
    ],
)
def test_what_the_encoding_of_the_output_lacks_is_escaped(cluster: FakeCluster, encoding: str, town: bytes) -> None:
    """Story: pages of a traceback at the first record from Łódź. JSON is for programs: it is UTF-8."""
    cluster.create("t", config={"delta.path": "/tables/Łódź"})
    cluster.store("t", 0, pa.RecordBatch.from_pylist([{"value": "Łódź".encode()}], schema=DEFAULT_SCHEMA))
    assert town in in_encoding(encoding, "consume", "t")
    assert "/tables/Łódź".encode() in in_encoding(encoding, "topics", "describe", "t", "-o", "json")
    assert b"Architecture" in in_encoding(encoding, "docs", "ARCHITECTURE")
