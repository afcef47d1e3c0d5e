"""Clients that take every file descriptor of a broker's process do not end it, and its logs still get theirs."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spark_broker import Admin, NewTopic, Producer
from spark_broker.storage.descriptors import Descriptors
from tests.support.process_cluster import LOOPBACK, Place, ProcessCluster

OPEN_FILES = 256
SILENT = 300

# In a process of its own, which has descriptors enough: connects, says nothing, and stays until its input ends.
CONNECT = """
import socket, sys
connections = []
for address in sys.argv[2].split(","):
    host, _, port = address.rpartition(":")
    for _ in range(int(sys.argv[1])):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex((host, int(port)))
        connections.append(connection)
print("connected", flush=True)
sys.stdin.read()
"""

# Raises its limit, uses it up, and opens a file all the same. Then it uses up what is spared for files.
USE_UP = """
import errno, os, socket, sys
from pathlib import Path
from spark_broker.broker.executor import is_running
from spark_broker.storage.descriptors import DESCRIPTORS
from spark_broker.storage.filesystem import LOCAL, process_start_time

boot_id = LOCAL.boot_id()
DESCRIPTORS.raise_limit()
taken = []
try:
    while True:
        taken.append(socket.socket())
except OSError as error:
    assert error.errno == errno.EMFILE, error
path = Path(sys.argv[1])
opened = [LOCAL.open(path / str(number), os.O_RDWR | os.O_CREAT) for number in range(20)]
LOCAL.sync_directory(path)
assert len(LOCAL.list_directory(path)) == 20
assert LOCAL.read_bytes(path / "7") == b""
assert process_start_time(os.getpid())
(path / "removed" / "below").mkdir(parents=True)
LOCAL.remove_tree(path / "removed")
assert not (path / "removed").exists()
try:
    socket.socket()
except OSError:
    print("spared", len(taken))
try:
    while True:
        opened.append(LOCAL.open(path / "7", os.O_RDWR))
except OSError as error:
    assert error.errno == errno.EMFILE, error
assert is_running(os.getpid())
assert LOCAL.boot_id() == boot_id
"""


@contextmanager
def silent_connections(servers: str) -> Iterator[None]:
    """`SILENT` connections to each of these brokers."""
    command = [sys.executable, "-c", CONNECT, str(SILENT), servers]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"connected\n"
        yield
        process.stdin.close()


def test_nobody_ends_and_logs_roll_and_topics_are_made(tmp_path: Path) -> None:
    """Story: 300 silent connections at `ulimit -n 256` counted as a failed disk, and all three brokers ended."""
    places = [Place(LOOPBACK, ("prlimit", f"--nofile={OPEN_FILES}:{OPEN_FILES}"))] * 3
    with ProcessCluster(tmp_path, 3, places=places, output=tmp_path) as brokers:
        servers = brokers.bootstrap_servers
        with Admin(servers) as admin, Producer(servers) as producer:
            admin.create_topic(NewTopic("t", 3, 3, config={"min.insync.replicas": 2, "segment.bytes": 65536}))
            producer.append("t", [{"value": b"v"}], partition=0).result(60)
            with silent_connections(servers):
                for _ in range(20):
                    producer.append("t", [{"value": bytes(30_000)}], partition=0).result(60)
                admin.create_topic(NewTopic("new", 3, 3))
                producer.append("new", [{"value": b"v"}], partition=0).result(60)
                assert brokers.launch_ended() == []
            assert admin.describe_topic("t").partitions[0].high_watermark == 21
            producer.append("t", [{"value": b"v"}], partition=1).result(60)
        assert brokers.launch_ended() == []


def test_files_are_opened_where_sockets_are_refused(tmp_path: Path) -> None:
    """Story: without descriptors, what was deleted stayed on the disk until the next start, the executor's JVM counted
    as gone where the kernel does not say when a process ends, and a broker that registered again ended on a bug.
    """
    limit = (OPEN_FILES, OPEN_FILES)
    done = subprocess.run(
        [sys.executable, "-c", USE_UP, str(tmp_path)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.startswith("spared"), done.stderr
    assert done.returncode == 0, done.stderr
    assert 100 < int(done.stdout.split()[1]) < OPEN_FILES


def test_without_a_limit_that_was_raised_the_error_stays() -> None:
    def refuse() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.raises(OSError, match="Too many open files"):
        Descriptors().spared(refuse)
