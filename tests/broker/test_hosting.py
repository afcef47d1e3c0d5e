"""How real broker processes are started, adopted, told apart and ended, and what they belong to. No Spark."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from spark_broker.broker import hosting
from spark_broker.broker.custody import Custody, CustodyThread
from spark_broker.broker.executor import ExecutorLog, WatchedProcess, executor_identity, is_running, parent_of
from spark_broker.broker.hosting import MAX_LINE_BYTES, KeptBroker, Lines, socket_name
from spark_broker.broker.spec import FAILED, LOST, STOPPED, BrokerOutcome, BrokerSpec, new_secret
from spark_broker.errors import ERRORS, InvalidRequestError, LogDirectoryLockedError
from spark_broker.storage.filesystem import ProcessIdentity, process_start_time
from tests.support.waiting import eventually

STAND_IN = "tests.support.stand_in_broker:run"
NOBODY = 65_534


def identity(pid: int) -> ProcessIdentity:
    return ProcessIdentity(pid, process_start_time(pid) or 0)


class Host:
    """Starts stand-ins for brokers of one executor, by default this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cluster_id = f"hosting-{os.getpid()}-{directory.name}"
        self.held: list[KeptBroker] = []
        self._secrets: dict[int, str] = {}  # by launch

    def spec(self, launch: int, **settings: str) -> BrokerSpec:
        return BrokerSpec(
            cluster_id=self.cluster_id,
            controller_host="127.0.0.1",
            controller_port=1,
            launch=launch,
            log_dirs=str(self.directory),
            host="127.0.0.1",
            rack=None,
            executor_id="0",
            settings={name.replace("_", "."): value for name, value in settings.items()},
            topic_defaults={},
            secret=self._secrets.setdefault(launch, new_secret()),
        )

    def start(self, launch: int, entry: str = STAND_IN, executor: int = -1, **settings: str) -> KeptBroker:
        owner = identity(os.getpid() if executor < 0 else executor)
        with (self.directory / "log").open("ab") as log:
            self.held.append(hosting.start(self.spec(launch, **settings), entry, owner, log=log))
        return self.held[-1]

    def adopt(self, launch: int) -> KeptBroker | None:
        broker = hosting.adopt(self.spec(launch))
        if broker is not None:
            self.held.append(broker)
        return broker

    def await_announced(self, launch: int) -> int:
        """The stand-in's pid, once it has announced itself."""
        path = self.directory / f"launch-{launch}"
        eventually(path.exists, what=f"launch {launch}")
        return int(msgspec.json.decode(path.read_bytes())["pid"])

    def log(self) -> str:
        return (self.directory / "log").read_text()

    def close(self) -> None:
        for broker in self.held:
            broker.close()
        for launch in {broker.launch for broker in self.held}:
            left = hosting.adopt(self.spec(launch))
            if left is not None:
                left.kill()
                left.wait(20)
                left.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


@pytest.fixture
def jvm() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for an executor's JVM. Only its pid matters."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_broker_is_a_fresh_interpreter_in_a_session_of_its_own(host: Host) -> None:
    broker = host.start(1)

    assert host.await_announced(1) == broker.pid
    assert os.getsid(broker.pid) == broker.pid != os.getsid(0)
    assert parent_of(broker.pid) == os.getpid()
    assert not broker.adopted


def test_whoever_comes_next_adopts_the_process_that_runs(host: Host) -> None:
    first = host.start(1)
    host.await_announced(1)
    first.close()

    for start in (False, True):
        again = host.start(1) if start else host.adopt(1)
        assert again is not None
        assert again.adopted
        assert again.pid == first.pid
        again.close()
    assert is_running(first.pid)
    (host.directory / "stop").touch()
    eventually(lambda: not is_running(first.pid), what="the stand-in's end")


def test_a_launch_that_is_gone_or_never_was_is_not_adopted(host: Host) -> None:
    assert host.adopt(7) is None
    broker = host.start(1)
    broker.kill()
    assert broker.wait(20) is not None

    assert host.adopt(1) is None


def test_of_many_who_start_a_launch_at_once_one_does_and_the_others_adopt(host: Host) -> None:
    ready, got = threading.Barrier(8), []

    def start() -> None:
        ready.wait(20)
        got.append(host.start(1))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert [broker.adopted for broker in got].count(False) == 1
    assert len({broker.pid for broker in got}) == 1


def test_a_frozen_broker_is_adopted_and_can_be_ended(host: Host) -> None:
    first = host.start(1)
    host.await_announced(1)
    os.kill(first.pid, signal.SIGSTOP)
    first.close()

    again = host.adopt(1)

    assert again is not None
    assert not again.has_ended
    again.kill()
    outcome = again.wait(20)
    assert outcome is not None
    assert outcome.reason == LOST


def test_a_killed_broker_is_reported_with_its_signal_and_its_neighbour_lives_on(host: Host) -> None:
    victim, neighbour = host.start(1), host.start(2)
    host.await_announced(1)

    os.kill(victim.pid, signal.SIGKILL)
    outcome = victim.wait(20)

    assert outcome is not None
    assert (outcome.reason, outcome.error_message) == (LOST, f"its process {victim.pid} ended (signal 9)")
    assert is_running(neighbour.pid)


def test_every_keeper_hears_how_the_broker_left(host: Host) -> None:
    starter = host.start(1)
    host.await_announced(1)
    adopter = host.adopt(1)
    assert adopter is not None

    (host.directory / "stop-1").touch()

    for keeper in (starter, adopter):
        outcome = keeper.wait(20)
        assert outcome is not None
        assert outcome.reason == STOPPED
        assert keeper.has_ended


def test_a_keeper_that_connected_before_the_end_hears_of_it_and_a_later_one_is_refused(host: Host) -> None:
    """The thread that would accept the keepers does not run: this test does not start it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = socket_name(host.spec(1))
    listener.bind(name)
    listener.listen()
    first, theirs = socket.socketpair()
    custody = Custody(0, adoption_timeout_ms=1000, shutdown_timeout_ms=1000)
    thread = CustodyThread(listener, theirs, identity(os.getpid()), custody)
    waiting = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    for keeper in waiting:
        keeper.connect(name)

    thread.report(BrokerOutcome(reason=STOPPED))

    for keeper in (first, *waiting):
        keeper.settimeout(20)
        assert BrokerOutcome.from_json(keeper.recv(65_536)).reason == STOPPED
        keeper.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as late, pytest.raises(ConnectionRefusedError):
        late.connect(name)
    theirs.close()
    listener.close()


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ("tests.support.stand_in_broker:fail_typed", "INCONSISTENT_CLUSTER_ID"),
        ("tests.support.stand_in_broker:fail_on_disk", "KAFKA_STORAGE"),
        ("tests.support.stand_in_broker:fail_by_a_bug", "UNKNOWN_SERVER"),
    ],
)
def test_what_kept_a_broker_from_running_reaches_its_keeper_as_a_typed_error(
    host: Host, entry: str, error: str
) -> None:
    outcome = host.start(1, entry).wait(30)

    assert outcome is not None
    assert outcome.reason == FAILED
    assert ERRORS[outcome.error_code](outcome.error_message).name == error


def test_a_broker_leaves_at_once_when_its_executor_ends_and_is_to_be_replaced(
    host: Host, jvm: subprocess.Popen[bytes]
) -> None:
    broker = host.start(1, executor=jvm.pid)
    host.await_announced(1)

    jvm.kill()
    outcome = broker.wait(20)

    assert outcome is not None
    assert (outcome.reason, outcome.error_message) == (LOST, f"its executor's JVM, process {jvm.pid}, has ended")
    assert "has ended" in (host.directory / "asked-1").read_text()


def test_a_broker_that_cannot_leave_in_order_ends_nevertheless_when_its_executor_does(
    host: Host, jvm: subprocess.Popen[bytes]
) -> None:
    (host.directory / "stubborn").touch()
    broker = host.start(1, executor=jvm.pid)
    host.await_announced(1)

    jvm.kill()
    outcome = broker.wait(20)

    assert outcome is not None
    assert outcome.reason == LOST
    assert "did not leave in time" in host.log()


def test_a_broker_whose_executor_ended_before_it_began_ends_at_once(host: Host, jvm: subprocess.Popen[bytes]) -> None:
    jvm.kill()
    jvm.wait(20)

    outcome = host.start(1, executor=jvm.pid).wait(20)

    assert outcome is not None
    assert outcome.reason == LOST


def test_the_end_of_its_starter_and_of_the_starters_process_group_is_nothing_to_a_broker(host: Host) -> None:
    """This is what `pyspark.daemon` does when it ends: it signals its whole process group."""
    source = (
        "import os, signal, sys, msgspec\n"
        "from spark_broker.broker import hosting\n"
        "from spark_broker.broker.spec import BrokerSpec\n"
        "from spark_broker.storage.filesystem import ProcessIdentity\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # which nohup has ignored
        "spec = BrokerSpec.from_json(sys.argv[1].encode())\n"
        "executor = msgspec.json.decode(sys.argv[2], type=ProcessIdentity)\n"
        "broker = hosting.start(spec, sys.argv[3], executor, log=open(os.devnull, 'ab'))\n"
        "print(broker.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    arguments = [host.spec(1).to_json().decode(), msgspec.json.encode(identity(os.getpid())).decode(), STAND_IN]
    with subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
        cwd=Path(__file__).parents[2],
    ) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        host.await_announced(1)
        os.killpg(starter.pid, signal.SIGHUP)
        starter.wait(20)

    adopted = host.adopt(1)

    assert adopted is not None
    assert adopted.pid == pid
    assert is_running(pid)


def test_a_broker_that_nobody_adopts_stops_in_order(host: Host) -> None:
    broker = host.start(1, broker_adoption_timeout_ms="200")
    host.await_announced(1)
    broker.close()

    eventually(lambda: not is_running(broker.pid), what="the end of the forgotten broker")

    assert "broker.adoption.timeout.ms" in (host.directory / "asked-1").read_text()


def test_the_next_keeper_ends_the_wait_for_it(host: Host) -> None:
    first = host.start(1, broker_adoption_timeout_ms="2000")
    host.await_announced(1)
    first.close()
    assert host.adopt(1) is not None

    threading.Event().wait(3.0)

    assert is_running(first.pid)
    assert not (host.directory / "asked-1").exists()


def test_who_knows_the_cluster_and_the_launches_takes_no_name_before_its_broker(host: Host) -> None:
    """Story: any user of the machine bound the next launches' names, and no broker started any more."""
    host.start(1)
    name = socket_name(host.spec(1))  # as every user sees it in /proc/net/unix
    assert name[1:] in Path("/proc/net/unix").read_text()
    without_secret = name.removesuffix(f"/{host.spec(1).secret}")
    guesses = [name.replace("/1/", "/2/"), without_secret.removesuffix("1") + "2"]
    with ExitStack() as squatted:
        for guess in guesses:
            squatter = squatted.enter_context(socket.socket(socket.AF_UNIX))
            squatter.bind(guess)
            squatter.listen()
        assert not host.start(2).adopted


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_neither_keeps_a_broker_nor_poses_as_one(host: Host) -> None:
    broker = host.start(1, broker_adoption_timeout_ms="1000")
    host.await_announced(1)
    names = [socket_name(host.spec(launch))[1:] for launch in (1, 2)]
    source = (
        "import os, socket, sys\n"
        f"os.setuid({NOBODY})\n"
        "stranger, poser = (socket.socket(socket.AF_UNIX) for _ in range(2))\n"
        "stranger.connect(chr(0) + sys.argv[1]); poser.bind(chr(0) + sys.argv[2]); poser.listen()\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(LogDirectoryLockedError, match=f"of user {NOBODY}"):
            host.start(2)
        broker.close()
        eventually(lambda: not is_running(broker.pid), what="the end of a broker that only a stranger held")
        other.kill()


def test_a_process_is_not_taken_for_a_later_one_with_its_pid(jvm: subprocess.Popen[bytes]) -> None:
    watched = WatchedProcess.of(jvm.pid)
    assert not watched.has_ended
    jvm.kill()

    assert watched.wait(20)
    watched.close()
    jvm.wait(20)
    with pytest.raises(ProcessLookupError):
        WatchedProcess(ProcessIdentity(os.getpid(), (process_start_time(os.getpid()) or 0) + 1))


def test_without_pidfd_the_end_of_a_process_is_seen_by_looking(
    jvm: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    watched = WatchedProcess.of(jvm.pid)
    assert watched.descriptor is None
    assert not watched.has_ended

    watched.kill()

    assert watched.wait(20)


def test_outside_of_spark_the_executor_is_a_guess_and_says_so() -> None:
    assert not executor_identity().verified


def test_the_log_goes_to_a_file_that_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "stderr"
    with path.open("ab") as appended, sleeper(appended.fileno()) as pid:
        log = ExecutorLog.of(pid)
        descriptor = log.open()
        assert descriptor is not None
        os.write(descriptor, b"from a broker\n")
        os.close(descriptor)

    assert log.shown == str(path)
    assert path.read_bytes() == b"from a broker\n"


def test_the_log_goes_beside_a_file_that_the_executor_would_write_over(tmp_path: Path) -> None:
    path = tmp_path / "stderr"
    with path.open("wb") as written, sleeper(written.fileno()) as pid:
        log = ExecutorLog.of(pid)
        descriptor = log.open()
        assert descriptor is not None
        os.close(descriptor)

    assert log.shown == f"{path}.brokers"
    assert Path(log.shown).exists()


@pytest.mark.parametrize("mode", ["ab", "wb"])
def test_a_log_whose_file_was_deleted_leaves_no_file_behind(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "stderr"
    with path.open(mode) as deleted, sleeper(deleted.fileno()) as pid:
        path.unlink()
        log = ExecutorLog.of(pid)
        descriptor = log.open()
        if descriptor is not None:
            os.close(descriptor)

    assert (descriptor is not None, log.shown) == (mode == "ab", "")
    assert list(tmp_path.iterdir()) == []


def test_a_reader_of_the_log_that_reads_nothing_does_not_stop_a_broker() -> None:
    reader, writer = os.pipe()
    with sleeper(writer) as pid:
        descriptor = ExecutorLog.of(pid).open()
        assert descriptor is not None
        with pytest.raises(BlockingIOError):
            fill(descriptor)
        os.close(descriptor)
    os.close(reader)
    os.close(writer)


def fill(descriptor: int) -> None:
    while True:
        os.write(descriptor, b"x" * 4096)


def test_a_log_that_is_a_socket_is_inherited() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs, sleeper(theirs.fileno()) as pid:
        assert ExecutorLog.of(pid).open() is None


class sleeper:  # noqa: N801 (read as a verb: `with sleeper(...)`)
    """The pid of a process with this stderr."""

    def __init__(self, stderr: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, stderr=stderr
        )

    def __enter__(self) -> int:
        return self._process.pid

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=20)


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory() -> None:
    lines = Lines()
    lines.feed(b"x" * MAX_LINE_BYTES)

    with pytest.raises(InvalidRequestError):
        lines.feed(b"x")


def test_whatever_comes_on_its_socket_a_broker_goes_on(host: Host) -> None:
    broker = host.start(1)
    host.await_announced(1)
    for data in (b"", b"\0" * 100_000, b"\xff\n", b"[" * 100_000 + b"\n", b'{"launch":' + b"9" * 5000 + b"}\n"):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(socket_name(host.spec(1)))
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            peer.settimeout(20)
            assert peer.recv(100) == b"", "its connection ends"
    again = host.adopt(1)
    assert again is not None
    assert again.pid == broker.pid
