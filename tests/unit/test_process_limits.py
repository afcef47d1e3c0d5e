"""What came of a limit of the process is no bug: the error names the limit, and ends only the call that met it."""

from __future__ import annotations

import errno
import queue
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from spark_broker import process_limits
from spark_broker.broker import process
from spark_broker.broker.__main__ import serve
from spark_broker.broker.custody import LeaveRequest
from spark_broker.broker.lease import Lease
from spark_broker.broker.spec import BrokerSpec
from spark_broker.cli import main as command_line
from spark_broker.errors import InvariantError, NoMemoryError, NoThreadError, ProcessLimitError
from spark_broker.process_limits import limit_reached
from spark_broker.protocol.arrow_message import decode_batch, encode_batch, layout_of, validate
from spark_broker.protocol.messages import EmptyResponse, FetchRequest, MetadataRequest
from spark_broker.protocol.schema import DEFAULT_SCHEMA, schema_from_bytes, schema_to_bytes
from spark_broker.transport.client import Connection
from spark_broker.transport.server import Server
from spark_broker.transport.server_stream import ServerStream
from tests.broker.rig import batch

SCARCE = """
import resource, threading
import pyarrow as pa
from spark_broker.process_limits import MIB, limit_reached
used = next(line for line in open("/proc/self/status") if line.startswith("VmSize:"))
allowed = int(used.split()[1]) * 1024 + 24 * MIB
resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
threading.stack_size(256 * MIB)
for act in (lambda: bytearray(64 * MIB), lambda: pa.allocate_buffer(1 << 30), threading.Thread(target=print).start):
    try:
        act()
    except (MemoryError, RuntimeError) as error:
        print(type(error).__name__, "->", limit_reached(error))
"""


def test_a_process_with_24_mib_left_names_the_limit_and_no_bug() -> None:
    done = subprocess.run([sys.executable, "-c", SCARCE], capture_output=True, text=True, timeout=60, check=True)
    python, arrow, thread = done.stdout.splitlines()
    assert python.startswith("MemoryError -> [NO_MEMORY] MemoryError; RLIMIT_AS (ulimit -v) allows ")
    assert arrow.startswith("ArrowMemoryError -> [NO_MEMORY] ")
    assert thread.startswith("RuntimeError -> [NO_THREAD] ")
    for line in (python, arrow, thread):
        assert "RLIMIT_AS (ulimit -v) allows" in line
        assert "report" not in line


@pytest.mark.parametrize("error", [MemoryError(), pa.ArrowMemoryError("malloc"), OSError(errno.ENOMEM, "no")])
def test_no_memory_is_told_apart(error: Exception) -> None:
    assert isinstance(limit_reached(error), NoMemoryError)


def test_no_thread_is_told_apart_and_other_errors_are_not_taken_for_limits() -> None:
    assert isinstance(limit_reached(RuntimeError("can't start new thread")), NoThreadError)
    assert [limit_reached(error) for error in (RuntimeError("x"), OSError(errno.EIO, "x"), ValueError("x"))] == [
        None
    ] * 3


def test_what_caused_an_error_counts() -> None:
    bug = ValueError("x")
    bug.__cause__ = MemoryError()
    assert isinstance(limit_reached(bug), NoMemoryError)


def test_the_limit_of_a_container_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1073741824\n")
    (tmp_path / "memory.current").write_text("1072693248\n")
    monkeypatch.setattr("spark_broker.process_limits._CGROUP", tmp_path)
    told = str(limit_reached(MemoryError()))
    assert "its control group (memory.max) allows 1,024 MiB, of which 1,023 MiB are used" in told


@contextmanager
def failing(error: Exception, bugs: list[BaseException]) -> Iterator[Connection]:
    """A server whose handlers raise this."""

    def fail(_: object) -> EmptyResponse:
        raise error

    def fail_stream(_: ServerStream) -> None:
        raise error

    server = Server("127.0.0.1", 0, fail, {"s": fail_stream}, bugs.append)
    connection = Connection("127.0.0.1", server.port)
    yield connection
    connection.close()


def test_a_call_and_a_stream_without_memory_end_alone_and_may_be_tried_again() -> None:
    bugs = list[BaseException]()
    with failing(MemoryError(), bugs) as connection:
        with pytest.raises(NoMemoryError) as of_call:
            connection.call(MetadataRequest(), timeout_ms=20_000)
        stream = connection.open_stream("s")
        stream.send(FetchRequest(1, max_wait_ms=0, min_bytes=0, max_bytes=1, partitions=[]))
        with pytest.raises(NoMemoryError) as of_stream:
            stream.receive(timeout_ms=20_000)
    assert of_call.value.retriable
    assert of_stream.value.retriable
    assert bugs == []


def test_a_change_that_failed_half_way_for_no_memory_ends_the_process() -> None:
    bugs = list[BaseException]()
    broken = InvariantError("half-way")
    broken.__cause__ = MemoryError()
    with failing(broken, bugs) as connection, pytest.raises(ProcessLimitError):
        connection.call(MetadataRequest(), timeout_ms=20_000)
    assert bugs == [broken]


def without_memory(*_: object, **__: object) -> None:
    raise pa.ArrowMemoryError("malloc of size 8 failed")


def test_no_memory_for_a_batch_is_no_damage_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker would put a replica aside whose bytes are well."""
    message = encode_batch(batch(b"x"))
    monkeypatch.setattr(pa.ipc, "read_record_batch", without_memory)
    with pytest.raises(MemoryError):
        decode_batch(message, DEFAULT_SCHEMA)
    with pytest.raises(MemoryError):
        validate(message, layout_of(schema_to_bytes(DEFAULT_SCHEMA)), max_uncompressed_bytes=1 << 20)


def test_no_memory_for_a_schema_is_no_fault_of_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    message = schema_to_bytes(DEFAULT_SCHEMA)
    monkeypatch.setattr(pa.ipc, "read_schema", without_memory)
    with pytest.raises(MemoryError):
        schema_from_bytes(message)


def run_out(spec: BrokerSpec, leave: LeaveRequest) -> str:
    """The entry of a broker that finds no memory."""
    raise MemoryError


def test_a_broker_that_ends_without_memory_says_so_to_its_driver() -> None:
    spec = BrokerSpec(
        cluster_id="c",
        controller_host="127.0.0.1",
        controller_port=1,
        launch=1,
        log_dirs="/nowhere",
        host="127.0.0.1",
        rack=None,
        executor_id="0",
        settings={},
        topic_defaults={},
        secret="s",
    )
    outcome = serve(spec, f"{__name__}:run_out", LeaveRequest())
    assert outcome.error_code == NoMemoryError.code
    assert outcome.error_message.startswith("MemoryError; ")


def test_a_command_without_memory_says_which_limit_it_met(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(command_line, "_check_dependencies", fail)
    with pytest.raises(SystemExit):
        command_line.main([])
    printed = capsys.readouterr().err
    assert "NO_THREAD" in printed


def out_of_memory(*_: object) -> None:
    raise MemoryError


def test_without_memory_to_find_out_more_the_limit_is_told_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_limits, "_lines", out_of_memory)
    told = limit_reached(MemoryError())
    assert isinstance(told, NoMemoryError)
    assert told.message == "MemoryError"


def test_a_broker_that_is_out_of_memory_ends_also_where_it_cannot_tell_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "limit_reached", out_of_memory)
    broker = object.__new__(process.Broker)
    broker._lease, broker._ends = Lease(), queue.SimpleQueue()
    error = MemoryError()
    with pytest.raises(MemoryError):
        broker._on_bug(error)
    assert broker._ends.get(timeout=10) is error
    assert not broker._lease.allows_reads


def test_a_command_at_a_limit_that_concerns_no_file_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Story: `cluster start` without a process more for its user ended with a traceback."""

    def fail() -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(command_line, "_check_dependencies", fail)
    with pytest.raises(SystemExit):
        command_line.main([])
    assert "Resource temporarily unavailable" in capsys.readouterr().err
