"""`spark-broker cluster`: which cluster runs here, what it looks like, and what is started."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import msgspec
import pyarrow as pa
import pytest

import jobs.cluster
from spark_broker.cli import cluster as cluster_commands
from spark_broker.cli import cluster_process
from spark_broker.cli.cluster_process import Application
from spark_broker.cli.cluster_state import ClusterState, default_state_file, end_process, running_cluster
from spark_broker.cli.installed import JOBS, job_file
from spark_broker.cli.options import BOOTSTRAP_VARIABLE, parse_settings
from spark_broker.config import load_cluster_settings
from spark_broker.driver.cluster import BrokerCluster
from spark_broker.driver.metadata_claim import CLAIM, Claim, Owner
from spark_broker.driver.metadata_store import LocalStore
from spark_broker.errors import ClusterStartError, InvalidDataError, NotControllerError
from spark_broker.protocol.messages import CallRequest, ControllerMetadata, ListOffsetsRequest
from spark_broker.storage.filesystem import LocalFileSystem
from tests.cli.conftest import Run
from tests.client.fake_broker import FakeCluster
from tests.support.small_disk import fill_disk, small_disk
from tests.support.waiting import eventually

WAIT_S = 20.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when it is asked to, as a driver does."""
    started = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield started
    started.kill()
    started.wait()


def note(path: Path, pid: int, bootstrap: str = "127.0.0.1:1") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    said = {"bootstrap_servers": bootstrap, "cluster_id": "c", "driver_pid": pid, "log_dirs": "d", "brokers": []}
    said |= {"driver_log": "cluster.log"}
    path.write_text(json.dumps(said))
    return path


def test_a_cluster_runs_while_its_driver_lives(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    path = note(tmp_path / "cluster.json", process.pid)
    state = running_cluster(path)
    assert state is not None
    assert (state.cluster_id, state.driver_pid) == ("c", process.pid)
    process.kill()
    process.wait()
    assert running_cluster(path) is None
    assert running_cluster(tmp_path / "nowhere.json") is None


def test_a_pid_that_was_used_again_is_not_taken_for_the_driver(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    """The note is an hour older than the process, so this process cannot have written it."""
    path = note(tmp_path / "cluster.json", process.pid)
    hour_ago = path.stat().st_mtime - 3600
    os.utime(path, (hour_ago, hour_ago))
    assert running_cluster(path) is None


@pytest.fixture
def own_note(tmp_path: Path) -> Path:
    """The note of a cluster whose driver is this process."""
    path = tmp_path / "own.json"
    write_note_of_this_process(path)
    return path


def write_note_of_this_process(path: Path) -> None:
    jobs.cluster.ReadyFile(path, temporary=False).write(no_brokers())


class NoBrokers(SimpleNamespace):
    """A cluster that says that it is reached at `servers`. Its brokers are of no interest."""

    @property
    def bootstrap_servers(self) -> str:
        if isinstance(self.servers, Exception):
            raise self.servers
        return str(self.servers)

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(live_brokers=[], bootstrap_servers=self.bootstrap_servers)


def no_brokers() -> BrokerCluster:
    names = {"servers": "127.0.0.1:1", "cluster_id": "c", "log_dirs": "d", "metadata_dir": "m"}
    return cast("BrokerCluster", NoBrokers(stopped=False, **names))


def changed(path: Path, **fields: object) -> Path:
    """The note, with other values in these fields."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path


def test_a_cluster_is_found_though_the_wall_clock_was_set_since(own_note: Path) -> None:
    """A virtual machine that was paused: its clock jumps, and its time since the boot does not."""
    hour_ago = own_note.stat().st_mtime - 3600
    os.utime(own_note, (hour_ago, hour_ago))
    state = running_cluster(own_note)
    assert state is not None
    assert state.driver_pid == os.getpid()


@pytest.mark.parametrize("change", [{"driver_start_time": 1}, {"boot_id": "another machine's"}])
def test_a_process_of_another_time_or_machine_is_not_the_driver(own_note: Path, change: dict[str, object]) -> None:
    assert running_cluster(changed(own_note, **change)) is None


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text("{}")
    with pytest.raises(InvalidDataError, match=r"cluster\.json"):
        running_cluster(path)


def test_a_process_is_asked_to_end_and_awaited(process: subprocess.Popen[bytes]) -> None:
    assert end_process(process.pid, 30.0)
    assert process.wait(30) == -15
    assert end_process(process.pid, 30.0)


def test_stop_ends_the_driver_and_removes_the_note(tmp_path: Path, process: subprocess.Popen[bytes], run: Run) -> None:
    path = note(tmp_path / "cluster.json", process.pid)
    assert run("cluster", "stop", "--state-file", path).status == 0
    assert process.wait(30) == -15
    assert not path.exists()


def test_stop_removes_a_note_that_was_renewed_while_its_driver_ended(tmp_path: Path, run: Run) -> None:
    """As its last deed, the driver noted a broker's new address. Then it was killed."""
    path, renewed = tmp_path / "cluster.json", tmp_path / "renewed.json"
    driver = "import os, signal, sys; signal.sigwait([signal.SIGTERM]); os.replace(*sys.argv[1:])"
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        process = subprocess.Popen([sys.executable, "-c", driver, str(renewed), str(path)])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    note(path, process.pid)
    note(renewed, process.pid, bootstrap="127.0.0.1:2")
    assert run("cluster", "stop", "--state-file", path).status == 0
    assert (process.wait(WAIT_S), path.exists()) == (0, False)


def test_stop_without_a_cluster_says_so(tmp_path: Path, run: Run) -> None:
    ended = run("cluster", "stop", "--state-file", tmp_path / "cluster.json")
    assert ended.status == 1
    assert "no cluster runs here" in ended.err


def no_locks(*_: object, wait_ms: int) -> bool:
    del wait_ms
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_stop_removes_the_note_of_a_driver_that_was_killed(own_note: Path, run: Run) -> None:
    ended = run("cluster", "stop", "--state-file", changed(own_note, driver_start_time=1))
    assert (ended.status, ended.err) == (1, f"error: no cluster runs here ({own_note})\n")
    assert not own_note.exists()


@pytest.mark.parametrize("has_locks", [True, False])
@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"boot_id": "another", "driver_host": "host-b"}, "on host-b, or here before this machine was started again"),
        ({"boot_id": "another", "driver_host": ""}, "on another machine, or here before"),  # an earlier version's
        ({"pid_namespace": "pid:[1]", "driver_start_time": 1}, "in another container"),
    ],
)
def test_stop_leaves_the_note_of_a_driver_that_is_not_seen_from_here(
    own_note: Path, run: Run, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], place: str, has_locks: bool
) -> None:
    """Story: `cluster stop` on a second machine that shares the home. The first did not find its cluster any more."""
    if not has_locks:
        monkeypatch.setattr(LocalFileSystem, "lock", no_locks)
    before = changed(own_note, **fields).read_bytes()
    ended = run("cluster", "stop", "--state-file", own_note)
    assert own_note.read_bytes() == before
    assert ended.status == 1
    assert f"the file stays: its driver (pid {os.getpid()}) ran {place}" in ended.err
    assert "Stop the cluster there; if it has ended, remove the file" in ended.err


def test_stop_leaves_the_note_whose_lock_a_driver_has(own_note: Path, run: Run) -> None:
    """A driver of an earlier version in another container: its note does not say so."""
    before = changed(own_note, driver_start_time=1, pid_namespace="").read_bytes()
    claim = cluster_process._claim_start(own_note)
    try:
        ended = run("cluster", "stop", "--state-file", own_note)
    finally:
        os.close(claim)
    assert own_note.read_bytes() == before
    assert ended.status == 1
    assert f"the file stays: process {os.getpid()} starts a cluster, or runs one where" in ended.err


def test_a_second_cluster_is_not_started_over_the_first(
    tmp_path: Path, process: subprocess.Popen[bytes], run: Run
) -> None:
    path = note(tmp_path / "cluster.json", process.pid)
    ended = run("cluster", "start", "--state-file", path)
    assert ended.status == 1
    assert f"pid {process.pid}" in ended.err


@pytest.mark.parametrize("detach", [("--detach",), ()])
def test_a_start_beside_another_one_is_refused_and_leaves_its_log(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, detach: tuple[str, ...]
) -> None:
    """Story: the second one emptied the log of the first, and removed its note when it failed. The cluster that ran
    could not be found or stopped."""
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("it started"))
    path, log = tmp_path / "cluster.json", tmp_path / "cluster.log"
    log.write_text("brokers registering: 1 of 3")
    claim = cluster_process._claim_start(path)
    try:
        ended = run("cluster", "start", *detach, "--state-file", path)
    finally:
        os.close(claim)
    assert ended.status == 1
    assert f"[CLUSTER_START] another start of a cluster is under way (pid {os.getpid()})" in ended.err
    assert log.read_text() == "brokers registering: 1 of 3"


def test_the_application_keeps_the_lock_of_its_note(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the command that has started it is killed."""
    script = tmp_path / "cluster.py"
    script.write_text(
        "import fcntl, os, select, sys\n"
        f"lock = os.open({str(tmp_path / '.cluster.json.lock')!r}, os.O_RDWR)\n"
        "while os.pread(lock, 32, 0) != str(os.getpid()).encode(): select.select([], [], [], 0.01)\n"
        "try:\n    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError:\n    sys.exit('error: it is locked')\n"
        "sys.exit('error: it is free')\n"
    )
    monkeypatch.setattr(cluster_process, "job_file", lambda _name: script)
    for _ in range(2):
        assert "error: it is locked" in run("cluster", "start", "-d", "--state-file", tmp_path / "cluster.json").err


def test_an_application_that_fails_leaves_the_note_of_another_one(
    tmp_path: Path,
    process: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(jobs.cluster, "log", lambda level, log_format: None)
    ready = note(tmp_path / "cluster.json", process.pid)
    metadata = str(tmp_path / "metadata")
    LocalStore(metadata).put(CLAIM, msgspec.json.encode(Claim(Owner.here("first", process.pid))))
    given = ["--set", f"metadata.dir={metadata}", "--set", f"log.dirs={tmp_path / 'logs'}", "--ready-file", str(ready)]
    assert jobs.cluster.main(given) == 1
    assert "[CLUSTER_IN_USE]" in capsys.readouterr().err
    assert running_cluster(ready) is not None
    note(ready, os.getpid())
    assert jobs.cluster.main(given) == 1
    assert not ready.exists()


@pytest.fixture
def application(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The cluster's application starts neither Spark nor brokers. The event ends it, as a signal does."""
    stop, cluster = threading.Event(), no_brokers()
    monkeypatch.setattr(jobs.cluster, "log", lambda level, log_format: None)
    monkeypatch.setattr(jobs.cluster, "session", lambda options, settings: nullcontext())
    monkeypatch.setattr(jobs.cluster, "stop_on_signals", lambda: stop)
    monkeypatch.setattr(jobs.cluster, "started", lambda *_: nullcontext(cluster))
    monkeypatch.setattr(jobs.cluster, "show", lambda cluster: None)
    monkeypatch.setattr(jobs.cluster, "RENEW_S", 0.0, raising=False)
    return stop


@contextmanager
def application_runs(stop: threading.Event, path: Path) -> Iterator[NoBrokers]:
    """The application with its ready file here, from its start to its end. Yields its cluster."""
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(jobs.cluster.main, ["--ready-file", str(path)])
        try:
            eventually(path.exists, WAIT_S, "the ready file")
            with jobs.cluster.started(None, None, None, stop) as cluster:  # type: ignore[arg-type]
                yield cast("NoBrokers", cluster)
        finally:
            stop.set()
        assert ended.result(WAIT_S) == 0
    assert not path.exists()


def servers_noted(path: Path) -> str:
    state = running_cluster(path)
    return "" if state is None else state.bootstrap_servers


def test_the_note_names_the_brokers_that_replace_others(
    tmp_path: Path, application: threading.Event, run: Run, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: each executor was lost once. Its successor had another address, and no command found the cluster again."""
    monkeypatch.delenv(BOOTSTRAP_VARIABLE)
    cluster.create("t", 1)
    with application_runs(application, default_state_file()) as started:
        started.servers = cluster.bootstrap
        eventually(lambda: servers_noted(default_state_file()) == cluster.bootstrap, WAIT_S, "the new addresses")
        assert run("topics", "list").out == "t\n"


def test_the_note_keeps_the_last_brokers_while_none_is_known(
    tmp_path: Path, application: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cluster.json"
    with application_runs(application, path) as started:
        started.servers = ""
        started.servers = NotControllerError("planted")
        eventually(lambda: "planted" in caplog.text, WAIT_S, "the warning")
        assert servers_noted(path) == "127.0.0.1:1"
        started.servers = "127.0.0.1:2"
        eventually(lambda: servers_noted(path) == "127.0.0.1:2", WAIT_S, "the new address")
    assert caplog.text.count("planted") == 1


def test_a_note_that_cannot_be_renewed_is_told_once_and_tried_again(
    tmp_path: Path, application: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", size_mb=1) as disk:
        path = disk / "cluster.json"
        with application_runs(application, path) as started:
            filled = fill_disk(disk)
            started.servers = "127.0.0.1:2"
            eventually(lambda: "No space left" in caplog.text, WAIT_S, "the warning")
            assert servers_noted(path) == "127.0.0.1:1"
            filled.unlink()
            eventually(lambda: servers_noted(path) == "127.0.0.1:2", WAIT_S, "the new address")
        assert caplog.text.count("No space left") == 1


def test_the_note_of_a_cluster_that_was_started_since_is_not_renewed(
    tmp_path: Path, application: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cluster.json"
    with application_runs(application, path) as started:
        changed(path, driver_pid=1)
        started.servers = "127.0.0.1:2"
        eventually(lambda: "another cluster's now" in caplog.text, WAIT_S, "the warning")
        assert json.loads(path.read_text())["bootstrap_servers"] == "127.0.0.1:1"
        changed(path, driver_pid=os.getpid())


@pytest.mark.parametrize("place", ["a file/ready.json", "a directory"])
def test_a_ready_file_that_cannot_be_written_is_told_before_spark_starts(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs.cluster, "log", lambda level, log_format: None)
    monkeypatch.setattr(jobs.cluster, "session", None)
    (tmp_path / "a file").write_text("")
    (tmp_path / "a directory").mkdir()
    assert jobs.cluster.main(["--ready-file", str(tmp_path / place)]) == 1
    assert f"the ready file {tmp_path / place} cannot be written" in capsys.readouterr().err
    assert sorted(found.name for found in tmp_path.iterdir()) == ["a directory", "a file"]


def test_a_ready_file_on_a_full_disk_is_an_error_in_a_line(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_mb=1) as disk:
        fill_disk(disk)
        with pytest.raises(ClusterStartError, match=r"own\.json cannot be written: No space left"):
            write_note_of_this_process(disk / "own.json")
        assert not (disk / "own.json").exists()


def test_commands_find_the_cluster_that_runs_here(run: Run) -> None:
    cluster = FakeCluster(2)
    try:
        note(default_state_file(), os.getpid(), cluster.bootstrap)
        cluster.create("t", 3)
        assert run("topics", "list").out == "t\n"
        status = run("cluster", "status", "-o", "json").json
    finally:
        cluster.close()
    assert status["cluster_id"] == "fake"
    assert status["driver_log"] == "cluster.log"
    assert [(broker["broker"]["id"], broker["leads"], broker["replicas"]) for broker in status["brokers"]] == [
        (0, 2, 3),
        (1, 1, 3),
    ]


def test_status_shows_a_lost_broker_as_fenced(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t", 3)
    cluster.kill(2)
    ended = run("cluster", "status", "-b", cluster.bootstrap)
    assert ended.status == 1
    states = {line.split()[0]: line.split()[-1] for line in ended.out.splitlines() if line.strip()[:1].isdigit()}
    assert states == {"0": "live", "1": "live", "2": "fenced"}


def test_status_counts_what_the_cluster_suffers_from(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t", 3)
    cluster.create("strict", 2, config={"min.insync.replicas": "3"})
    ended = run("cluster", "status", "-b", cluster.bootstrap)
    assert ended.status == 0
    assert (
        "health: 0 of 3 brokers fenced; 0 of 5 partitions offline, 0 under-replicated, 0 under min.insync" in ended.out
    )
    cluster.kill(2)
    cluster.topics["t"].partitions[0].leader = -1
    ended = run("cluster", "status", "-b", cluster.bootstrap)
    assert ended.status == 1
    assert (
        "health: 1 of 3 brokers fenced; 1 of 5 partitions offline, 5 under-replicated, 2 under min.insync" in ended.out
    )
    ended = run("cluster", "status", "-b", cluster.bootstrap, "-o", "json")
    assert ended.status == 1
    assert ended.json["health"] == {
        "brokers": 3,
        "fenced_brokers": 1,
        "partitions": 5,
        "offline_partitions": 1,
        "under_replicated_partitions": 5,
        "under_min_isr_partitions": 2,
    }


def test_a_planned_move_is_no_trouble_and_is_shown(cluster: FakeCluster, run: Run) -> None:
    """Story: an operator moved a replica, a monitor woke him up, and the doctor told him to bring a broker back."""
    cluster.create("t", 2).partitions[1].adding = [2]
    ended = run("cluster", "status", "-b", cluster.bootstrap)
    assert (ended.status, "0 under-replicated" in ended.out) == (0, True)
    rows = [line.split() for line in run("topics", "describe", "t").out.splitlines()]
    assert ["1", "1", "0", "0,1,2", "0,1", "2", "0", "0"] in rows
    (_, moving) = run("topics", "describe", "t", "-o", "json").json["partitions"]
    assert moving["adding"] == [2]
    cluster.kill(0)
    assert "2 under-replicated" in run("cluster", "status", "-b", cluster.bootstrap).out


@pytest.mark.parametrize(
    "command",
    [
        ("cluster", "status"),
        ("doctor",),
        ("leader-election", "--election-type", "unclean", "--topic", "t"),
        ("produce", "t"),
        ("topics", "alter-schema", "t", "--column", "more:int64"),
        ("topics", "create", "new"),
    ],
)
def test_a_command_that_shows_no_offsets_waits_for_no_leader(
    cluster: FakeCluster, run: Run, command: tuple[str, ...]
) -> None:
    """Story: each partition without a leader took two seconds, when there was most to look at."""
    cluster.create("t", 2, schema=pa.schema({"n": pa.int64()}))
    cluster.elect("t", 0, -1)
    asked: list[ListOffsetsRequest] = []

    def look(broker: int, request: CallRequest) -> None:
        if isinstance(request, ListOffsetsRequest):
            asked.append(request)

    cluster.call_hook = look
    run(*command)
    assert asked == []


@pytest.mark.parametrize("named", [True, False])
def test_status_says_how_the_cluster_is_reached_and_where_its_data_is(
    tmp_path: Path, cluster: FakeCluster, run: Run, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """`named`: the addresses are given. The note beside them is still of the same cluster."""
    state = ClusterState(cluster.bootstrap, "fake", os.getpid(), log_dirs="/logs", metadata_dir="s3://bucket/metadata")
    path = tmp_path / "cluster.json"
    path.write_bytes(msgspec.json.encode(state))
    if not named:
        monkeypatch.delenv(BOOTSTRAP_VARIABLE)
    shown = run("cluster", "status", "--state-file", path).out
    assert f"bootstrap.servers = {cluster.bootstrap}\nlog.dirs = /logs\nmetadata.dir = s3://bucket/metadata\n" in shown
    described = run("cluster", "status", "--state-file", path, "-o", "json").json
    assert (described["log_dirs"], described["metadata_dir"]) == ("/logs", "s3://bucket/metadata")


def test_the_note_of_another_cluster_says_nothing_of_this_one(cluster: FakeCluster, tmp_path: Path, run: Run) -> None:
    path = note(tmp_path / "cluster.json", os.getpid())
    assert run("cluster", "status", "-b", cluster.bootstrap, "--state-file", path, "-o", "json").json["log_dirs"] == ""
    path.write_text("{}")
    assert run("cluster", "status", "-b", cluster.bootstrap, "--state-file", path).status == 0


def test_every_command_that_is_advised_names_the_state_file_that_was_given(
    tmp_path: Path, run: Run, started: list[Application], process: subprocess.Popen[bytes]
) -> None:
    path = tmp_path / "my cluster.json"
    given = ("--state-file", path)
    assert f"`spark-broker cluster start --state-file '{path}'`" in run("cluster", "status", *given).err
    assert f"`spark-broker cluster stop --state-file '{path}'`" in run("cluster", "start", "--detach", *given).err
    note(path, process.pid)
    assert f"`spark-broker cluster stop --state-file '{path}'` ends it" in run("cluster", "start", *given).err
    assert len(started) == 1


def test_status_says_who_the_controller_is_and_where_everybody_logs(run: Run) -> None:
    cluster = FakeCluster(2)
    cluster.controller = ControllerMetadata("the-host", 42, 1_700_000_000_000)
    cluster.logs[1] = "the-work-dir/app-1/1/stderr"
    try:
        note(default_state_file(), os.getpid(), cluster.bootstrap)
        shown = run("cluster", "status").out
    finally:
        cluster.close()
    assert "controller: epoch 1, of the driver with pid 42 on the-host, since 2023-11-1" in shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "driver and controller cluster.log" in lines
    assert "broker 1, executor the-work-dir/app-1/1/stderr" in lines


def test_an_application_that_ends_says_why_in_one_line(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "cluster.py"
    script.write_text("import sys; sys.exit('noise\\nerror: [CLUSTER_IN_USE] in use by pid 7')")
    monkeypatch.setattr(cluster_process, "job_file", lambda _name: script)

    ended = run("cluster", "start", "--detach", "--state-file", tmp_path / "cluster.json")

    assert ended.status == 1
    assert ended.err.splitlines() == [f"error: [CLUSTER_IN_USE] in use by pid 7 (log: {tmp_path / 'cluster.log'})"]


@pytest.mark.parametrize("moment", ["before the spinner", "after the start", "in the start"])
def test_an_application_does_not_outlive_a_start_that_is_interrupted(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Story: Ctrl-C between the start of the process and the wait for it. It ran on, and nobody was told of it."""
    script, started = tmp_path / "cluster.py", list[subprocess.Popen[bytes]]()
    script.write_text("import signal; signal.pause()")
    monkeypatch.setattr(cluster_process, "job_file", lambda _name: script)

    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    def popen(*arguments: Any, **settings: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(*arguments, **settings))
        if moment == "in the start":
            signal.raise_signal(signal.SIGINT)
        if moment == "after the start":
            monkeypatch.setattr(cluster_process, "_wait_until_ready", interrupted)
        return started[0]

    monkeypatch.setattr(
        cluster_process,
        "subprocess",
        SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT),
    )
    if moment == "before the spinner":
        monkeypatch.setattr("rich.console.Console.status", interrupted)
    try:
        assert run("cluster", "start", "--detach", "--state-file", tmp_path / "cluster.json").status == 130
        assert [process.wait(WAIT_S) for process in started] == [-signal.SIGTERM] * (moment != "before the spinner")
    finally:
        for process in started:
            process.kill()


@pytest.mark.parametrize("given", ["-1", "3000000", "9" * 400])
def test_a_time_that_no_wait_can_last_is_refused_before_anything_is_done(
    tmp_path: Path, run: Run, process: subprocess.Popen[bytes], started: list[Application], given: str
) -> None:
    """Story: `stop --timeout -1` waited for ever; 3,000,000 ended in a traceback once the driver was told to end."""
    path = note(tmp_path / "cluster.json", process.pid)
    assert run("cluster", "stop", "--timeout", given, "--state-file", path).status == 2
    assert process.poll() is None
    assert running_cluster(path) is not None
    assert run("cluster", "start", "--detach", "--timeout", given, "--state-file", tmp_path / "new.json").status == 2
    assert started == []


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 1e12])
def test_a_process_is_awaited_for_as_long_as_the_system_can(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    process.send_signal(signal.SIGSTOP)
    if timeout_s > 0:
        process.send_signal(signal.SIGCONT)
    assert end_process(process.pid, timeout_s) is (timeout_s > 0)


def test_status_without_a_cluster_is_status_one(tmp_path: Path, run: Run) -> None:
    ended = run("cluster", "status", "--state-file", tmp_path / "cluster.json")
    assert ended.status == 1
    assert "no cluster runs here" in ended.err


def test_a_configuration_in_another_encoding_is_a_mistake(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes("[cluster]\n# Größe\nnum.partitions = 3\n".encode("latin-1"))
    ended = run("cluster", "start", "--config", path)
    assert ended.status == 1
    assert f"{path} is not UTF-8" in ended.err


def test_a_configuration_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(b'\xef\xbb\xbf[cluster]\r\n"num.partitions" = 7\r\n')
    assert load_cluster_settings(path).cluster.num_partitions == 7


@pytest.mark.parametrize("home", ["/dev/null", "a directory"])
def test_a_state_directory_that_cannot_be_used_is_no_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    """HOME=/dev/null, and a note in whose place there is a directory."""
    (tmp_path / "spark-broker" / "cluster.json").mkdir(parents=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path) if home == "a directory" else home)
    for command in (("topics", "list"), ("cluster", "status"), ("cluster", "stop")):
        ended = run(*command)
        assert (ended.status, ended.err.count("\n\n")) == (1, 0)
        assert "bootstrap-server" in ended.err or "no cluster runs here" in ended.err


def test_a_user_without_a_home_is_told_what_to_set(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", unknown)
    ended = run("topics", "list")
    assert ended.status == 1
    assert "XDG_STATE_HOME" in ended.err


def test_a_file_that_cannot_be_written_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    ended = run("cluster", "start", "--detach", "--temporary")
    assert ended.status == 1
    assert "/dev/null" in ended.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "num.partition=3"), "did you mean 'num.partitions'?"),
        (("--set", "num.partitions"), "is not NAME=VALUE"),
        (("--config", "nowhere.toml"), "nowhere.toml does not exist"),
        (("--config", "nowhere.toml", "--set", "num.partitions=3"), "not both"),
        (("--config", ""), "cannot be read: Is a directory"),  # `--config "$CONFIG"` without CONFIG
        (("--config", "/"), "cannot be read: Is a directory"),
    ],
)
def test_a_mistake_in_the_settings_shows_before_spark_starts(run: Run, arguments: tuple[str, ...], said: str) -> None:
    ended = run("cluster", "start", *arguments)
    assert ended.status == 1
    assert said in ended.err


def test_the_application_is_told_what_the_command_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    application = Application(
        brokers=2,
        ready_file=tmp_path / "ready",
        master="local-cluster[2,1,512]",
        settings={"log.dirs": "d"},
        spark_settings={"spark.ui.enabled": "false", "spark.app.name": "two words"},
        log_level="DEBUG",
        take_over=True,
    )
    command = application.command()
    assert command[:2] == [sys.executable, str(job_file("cluster"))]
    assert command[2:] == [
        *("--brokers", "2", "--ready-file", str(tmp_path / "ready")),
        *("--master", "local-cluster[2,1,512]", "--set", "log.dirs=d", "--log-level", "DEBUG", "--take-over"),
    ]
    given = "--conf spark.ui.enabled=false --conf 'spark.app.name=two words'"
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    assert application.environment()["PYSPARK_SUBMIT_ARGS"] == f"{given} pyspark-shell"
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--driver-memory 8g pyspark-shell")
    assert application.environment()["PYSPARK_SUBMIT_ARGS"] == f"--driver-memory 8g  {given} pyspark-shell"


def test_a_configuration_that_can_be_read_once_reaches_the_application(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: the application read an empty pipe, and the cluster kept its data in a temporary directory."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = '[cluster]\nlog.dirs = "/srv/logs"\n[topic]\nretention.ms = 604800000\nkey.columns = ["a", "b"]\n'
    writing = threading.Thread(target=pipe.write_text, args=(text,))
    writing.start()
    started: list[Application] = []

    def become(application: Application) -> None:
        started.append(application)
        raise SystemExit(0)

    monkeypatch.setattr(cluster_commands, "run_in_foreground", become)
    run("cluster", "start", "--config", pipe, "--state-file", tmp_path / "cluster.json")
    writing.join()
    (application,) = started
    given = load_cluster_settings(parse_settings(f"{name}={value}" for name, value in application.settings.items()))
    assert given.cluster.given() == {"log.dirs": "/srv/logs"}
    assert given.topic.given() == {"retention.ms": "604800000", "key.columns": "a,b"}


@pytest.mark.parametrize("text", ["a = " + "9" * 10_000, "a = " + "[" * 10_000])
def test_a_configuration_that_python_does_not_take_is_a_mistake(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    ended = run("cluster", "start", "--config", path)
    assert ended.status == 1
    assert ended.err.startswith(f"error: [INVALID_CONFIG] {path}: ")


def test_the_cluster_of_another_user_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    with pytest.raises(PermissionError, match="another user's") as refused:
        end_process(os.getpid(), 1.0)
    assert refused.value.filename == f"process {os.getpid()}", "the command shows errors that name something"


@pytest.mark.parametrize("name", JOBS)
def test_the_jobs_are_there(name: str, run: Run) -> None:
    path = Path(run("jobs", "path", name).out.strip())
    assert path.is_file()
    assert path.parent == Path(run("jobs", "path").out.strip())


def test_the_pages_are_there(run: Run) -> None:
    names = run("docs").out.split()
    assert {"hosting", "configuration", "install", "deploy"} <= {*names}
    for name in names:
        assert run("docs", name).out.startswith("# ")
    assert run("docs", "docs/hosting.md", "--path").out.endswith("docs/hosting.md\n")
    assert "There are ARCHITECTURE, backup" in run("docs", "nosuch").err


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Application]:
    """What was to be started. Nothing is."""
    applications: list[Application] = []

    def start(application: Application, timeout_s: float) -> ClusterState:
        del timeout_s
        applications.append(application)
        return ClusterState("127.0.0.1:1", "id", 1)

    monkeypatch.setattr(cluster_commands, "start_detached", start)
    monkeypatch.setattr(cluster_commands, "print_cluster", lambda *_: None)
    return applications


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ((), "default"),
        (("--name", "other"), "other"),
        (("--temporary",), None),
        (("--set", "log.dirs=/mine"), None),
    ],
)
def test_a_detached_cluster_keeps_its_data_in_a_directory_of_its_name(
    run: Run, started: list[Application], tmp_path: Path, given: tuple[str, ...], kept: str | None
) -> None:
    """Story: 30,000 records, `cluster stop`, and all of them were deleted."""
    ended = run("cluster", "start", "--detach", *given)
    assert ended.status == 0, ended.err
    directory = tmp_path / "data" / "spark-broker" / "clusters" / (kept or "")
    assert started[0].data_dir == (None if kept is None else directory)
    assert (f"is kept in {directory}" in ended.err) is (kept is not None)
    assert ("--data-dir" in started[0].command()) is (kept is not None)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a."])
def test_a_name_that_is_no_name_of_a_directory_is_refused(run: Run, started: list[Application], name: str) -> None:
    assert run("cluster", "start", "--detach", "--name", name).status == 1
    assert not started


@pytest.mark.parametrize(
    ("temporary", "there", "said"),
    [
        (False, True, "stopped; its data is kept in {logs}\n"),
        (False, False, "stopped; its data is kept in {logs}\n"),
        (True, True, "stopped; its data was temporary, but {logs} is left\n"),
        (True, False, "stopped; its data was temporary and is deleted\n"),
        (None, True, "stopped; its data is in {logs} on the executors' machines, unless it was temporary\n"),
        (None, False, "stopped; its data is in {logs} on the executors' machines, unless it was temporary\n"),
    ],
)
def test_stop_says_what_becomes_of_the_data(
    run: Run, tmp_path: Path, process: subprocess.Popen[bytes], temporary: bool | None, there: bool, said: str
) -> None:
    """Story: the driver's machine had no log.dirs. The data that the workers kept was said to be deleted.

    `there`: this machine has the directory. `temporary` None: the note of an earlier version.
    """
    path, logs = tmp_path / "cluster.json", tmp_path / "logs"
    if there:
        logs.mkdir()
    note(path, process.pid)
    changed(path, log_dirs=str(logs), **({} if temporary is None else {"temporary": temporary}))
    assert run("cluster", "stop", "--state-file", path).err.endswith(said.format(logs=logs))


@pytest.mark.parametrize(
    ("given", "temporary"), [((), True), (("--set", "log.dirs={logs}"), False), (("--data-dir", "{logs}"), False)]
)
@pytest.mark.usefixtures("application")
def test_the_note_says_whether_the_data_is_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], temporary: bool
) -> None:
    path, noted = tmp_path / "ready.json", list[ClusterState | None]()
    monkeypatch.setattr(jobs.cluster, "run", lambda *_: noted.append(running_cluster(path)))
    arguments = [argument.format(logs=tmp_path / "logs") for argument in given]
    assert jobs.cluster.main([*arguments, "--ready-file", str(path)]) == 0
    (state,) = noted
    assert state is not None
    assert state.temporary is temporary
