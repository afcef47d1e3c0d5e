"""A command whose standard streams are closed or full, or whose reader has left."""

from __future__ import annotations

import os
import subprocess
import sys

import pyarrow as pa
import pytest

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


def in_encoding(encoding: str, *arguments: str) -> bytes:
    """What the command prints on a terminal of this encoding. There is no error."""
    command = [sys.executable, "-m", "spark_broker.cli.main", *arguments]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


@pytest.mark.parametrize(
    ("encoding", "town"),
    [("ascii", b"\\u0141\\xf3d\\u017a"), ("iso-8859-1", b"\\u0141\xf3d\\u017a"), ("utf-8", "Łódź".encode())],
)
def test_what_the_encoding_of_the_output_lacks_is_escaped(cluster: FakeCluster, encoding: str, town: bytes) -> None:
    """Story: pages of a traceback at the first record from Łódź. JSON is for programs: it is UTF-8."""
    cluster.create("t", config={"delta.path": "/tables/Łódź"})
    cluster.store("t", 0, pa.RecordBatch.from_pylist([{"value": "Łódź".encode()}], schema=DEFAULT_SCHEMA))
    assert town in in_encoding(encoding, "consume", "t")
    assert "/tables/Łódź".encode() in in_encoding(encoding, "topics", "describe", "t", "-o", "json")
    assert b"Architecture" in in_encoding(encoding, "docs", "ARCHITECTURE")
