"""What an exception that nobody expects does in each kind of thread of a broker, a controller and a driver."""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
from pyspark.sql import SparkSession

from spark_broker import threads
from spark_broker.broker.broker_calls import _Caller
from spark_broker.broker.coordinator_thread import CoordinatorThread
from spark_broker.broker.custody import ENDED_BY_FORCE, Custody, CustodyThread
from spark_broker.broker.fetch_session import FetcherSettings
from spark_broker.broker.fetcher import ReplicaFetcherThread
from spark_broker.broker.file_worker import FileWorker
from spark_broker.broker.isr_proposals import IsrProposals
from spark_broker.broker.log_cleaner import LogCleanerThread
from spark_broker.broker.maintenance import Maintenance
from spark_broker.broker.membership import Membership
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.session import ControllerSession, SessionEvents, _Heartbeats
from spark_broker.config import ClusterConfig, ClusterSettings, TopicConfig
from spark_broker.controller.controller import Controller
from spark_broker.controller.effects import ProbePort
from spark_broker.controller.image import EMPTY_IMAGE
from spark_broker.driver import controller_client, controller_service
from spark_broker.driver.broker_session import BrokerSession
from spark_broker.driver.cluster import BrokerCluster
from spark_broker.driver.controller_client import ControllerClient
from spark_broker.driver.controller_link import ControllerLink
from spark_broker.driver.controller_log import PipeHandler
from spark_broker.driver.controller_loop import Carrier, ControllerLoop
from spark_broker.driver.controller_pipe import ControllerConfig, ControllerFailed, LogLine, to_line
from spark_broker.driver.controller_service import ControllerService
from spark_broker.driver.keeper_connections import KeeperConnections, KeeperListener
from spark_broker.driver.launcher import BrokerLauncher
from spark_broker.driver.metadata_claim import ClaimKeeper, Owner
from spark_broker.driver.metadata_log import MetadataLog
from spark_broker.driver.metadata_store import LocalStore
from spark_broker.errors import ClosedError, NetworkError, NotControllerError
from spark_broker.history.schedule import TieringSchedule
from spark_broker.protocol.messages import EmptyResponse, FetchRequest, MetadataRequest
from spark_broker.storage.filesystem import ProcessIdentity
from spark_broker.threads import Worker
from spark_broker.transport.client import Connection
from spark_broker.transport.client_loop import client_loop
from spark_broker.transport.client_stream import ClientStream
from spark_broker.transport.server import Server
from spark_broker.transport.server_stream import ServerStream
from tests.broker.rig import Rig
from tests.support.no_threads import no_threads
from tests.support.waiting import eventually

BUG = ValueError("nobody expects this")
WAIT_S = 20.0


class Ends:
    """What a process or a client is told when a thread of its own has died."""

    def __init__(self) -> None:
        self._ends: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def __call__(self, error: BaseException) -> None:
        self._ends.put(error)

    def bug(self) -> BaseException:
        return self._ends.get(timeout=WAIT_S)


class Once:
    """Raises the first time, and then does what is to be done."""

    def __init__(self, act: Callable[..., object] = lambda *_: None) -> None:
        self._act = act
        self.calls = 0
        self.done = threading.Event()

    def __call__(self, *arguments: object) -> object:
        self.calls += 1
        if self.calls == 1:
            raise BUG
        self.done.set()
        return self._act(*arguments)


def fail(*_: object, **__: object) -> None:
    raise BUG


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PAUSE_S", 0.0)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ReplicaManager]:
    rig = Rig(tmp_path, 1)
    yield rig.brokers[0].manager
    rig.stop()


CONFIG = ClusterConfig(log_cleaner_backoff_ms=10)
NOWHERE = ("127.0.0.1", 1)


def heartbeats(manager: ReplicaManager, ends: Ends) -> Worker:
    events = SessionEvents(lambda _: None, lambda _: None, lambda _: None, ends)
    membership = Membership(manager, manager._lease, events)
    worker = _Heartbeats(cast("ClientStream", None), membership, ends)
    worker._interval_ms = 1
    return worker


def session(manager: ReplicaManager, ends: Ends) -> Worker:
    events = SessionEvents(lambda _: None, lambda _: None, lambda _: None, ends)
    return ControllerSession(Connection(*NOWHERE), cast("Callable[[], object]", None), manager, manager._lease, events)  # type: ignore[arg-type]


def of_files(manager: ReplicaManager, ends: Ends) -> Worker:
    worker = FileWorker(ends)
    worker.manager = manager
    worker.begin()
    return worker


def of_calls(manager: ReplicaManager, ends: Ends) -> Worker:
    del manager
    worker = _Caller("calls", Connection(*NOWHERE), ends)
    worker.put(EmptyResponse(), 1, lambda _: None)
    return worker


def of_a_coordinator(manager: ReplicaManager, ends: Ends) -> Worker:
    worker = CoordinatorThread("transactions", ends)
    worker.coordinator = cast("object", manager)  # type: ignore[assignment]
    return worker


BROKERS_THREADS: dict[str, tuple[Callable[[ReplicaManager, Ends], Worker], str]] = {
    "isr-proposals": (lambda _, ends: IsrProposals(Connection(*NOWHERE), 1, ends), "_take"),
    "replica-files": (of_files, "_work_off"),
    "transactions": (of_a_coordinator, "_news"),
    "maintenance": (lambda manager, ends: Maintenance(manager, CONFIG, ends), "run_due"),
    "log-cleaner": (lambda manager, ends: LogCleanerThread(manager, CONFIG, ends), "_clean_all"),
    "fetcher": (lambda _, ends: ReplicaFetcherThread(*NOWHERE, FetcherSettings(0, 1, 1, 1, 1), ends), "_await_session"),
    "controller-session": (session, "_run_once"),
    "heartbeats": (heartbeats, "_membership"),
    "calls": (of_calls, "_make"),
}


@pytest.mark.parametrize("name", BROKERS_THREADS)
def test_a_thread_of_a_broker_that_dies_ends_the_broker(manager: ReplicaManager, name: str) -> None:
    ends = Ends()
    make, broken = BROKERS_THREADS[name]
    worker = make(manager, ends)
    if callable(getattr(worker, broken)):
        setattr(worker, broken, fail)
    else:
        setattr(worker, broken, None)  # an AttributeError
    worker.start()
    assert isinstance(ends.bug(), ValueError | AttributeError)
    worker.join(WAIT_S)
    assert not worker.is_alive()


def test_the_thread_that_looks_after_a_broker_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: queue.SimpleQueue[int] = queue.SimpleQueue()
    listener, (peer, keeper) = socket.socket(socket.AF_UNIX), socket.socketpair()
    custody = Custody(0, adoption_timeout_ms=1000, shutdown_timeout_ms=1000)
    worker = CustodyThread(
        listener, keeper, ProcessIdentity(os.getpid(), 0), custody, end_process=lambda status: statuses.put(status)
    )
    monkeypatch.setattr(worker, "_look", fail)
    monkeypatch.setattr(worker, "_watch_executor", lambda: None)
    worker.start()
    assert statuses.get(timeout=WAIT_S) == ENDED_BY_FORCE
    worker.join(WAIT_S)
    worker._selector.close()
    for end in (listener, peer, keeper):
        end.close()


def test_the_thread_of_a_streams_answers_ends_the_broker() -> None:
    ends, posted = Ends(), threading.Event()

    def handler(stream: ServerStream) -> None:
        stream.post(EmptyResponse(), fail)
        posted.set()
        stream.receive()

    server = Server("127.0.0.1", 0, lambda _: EmptyResponse(), {"s": handler}, ends)
    stream = Connection("127.0.0.1", server.port).open_stream("s")
    stream.send(FetchRequest(1, max_wait_ms=0, min_bytes=0, max_bytes=1, partitions=[]))
    assert ends.bug() is BUG
    stream.close()


def test_the_thread_that_moves_the_bytes_of_a_server_ends_its_process() -> None:
    ends = Ends()
    server = Server("127.0.0.1", 0, lambda _: EmptyResponse(), {}, ends)
    server.loop.soon(fail)
    assert ends.bug() is BUG


def test_the_thread_that_receives_for_clients_ends_their_connections_and_is_begun_again() -> None:
    began, go_on = threading.Event(), threading.Event()

    def wait(_: object) -> EmptyResponse:
        began.set()
        go_on.wait(WAIT_S)
        return EmptyResponse()

    server = Server("127.0.0.1", 0, wait, {}, Ends())
    connection = Connection("127.0.0.1", server.port)
    with ThreadPoolExecutor() as others:
        waits = others.submit(connection.call, MetadataRequest(None), timeout_ms=30_000)
        assert began.wait(WAIT_S)
        client_loop.get().soon(fail)
        with pytest.raises(NetworkError, match="ended"):
            waits.result(WAIT_S)
    go_on.set()
    assert connection.call(MetadataRequest(None), timeout_ms=30_000) == EmptyResponse()


def test_the_thread_that_sends_to_a_broker_ends_the_controller() -> None:
    class Stream:
        send = staticmethod(fail)

    ends = Ends()
    BrokerSession(1, cast("ServerStream", Stream()), ends).send(EmptyResponse())
    assert ends.bug() is BUG


def test_the_thread_that_sends_to_a_broker_ends_with_a_session_that_was_given_up() -> None:
    """Story: the broker stood still, and 10,000 messages waited. It went on and took them: the thread stayed."""
    goes_on = threading.Event()

    class Stream:
        def send(self, message: object) -> None:
            assert goes_on.wait(WAIT_S)

    ends = Ends()
    session = BrokerSession(987_654, cast("ServerStream", Stream()), ends)
    while not session.closed:
        session.send(EmptyResponse())
    session.close()
    goes_on.set()
    session.wait_sent(WAIT_S)
    assert not [thread for thread in threading.enumerate() if thread.name == "session-987654"]


def test_the_controllers_loop_ends_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends()
    log = MetadataLog(LocalStore(str(tmp_path)), records_between_snapshots=100, snapshots_kept=1)
    settings = ClusterSettings(cluster=ClusterConfig(), topic=TopicConfig())
    loop = ControllerLoop(Controller(EMPTY_IMAGE, settings), log, cast("Carrier", None), ends)
    monkeypatch.setattr(loop, "step", fail)
    loop.start()
    assert ends.bug() is BUG
    assert loop._stopped.is_set()


def test_a_probe_of_a_port_that_fails_ends_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends()
    log = MetadataLog(LocalStore(str(tmp_path)), records_between_snapshots=100, snapshots_kept=1)
    service = ControllerService(ClusterSettings(cluster=ClusterConfig(), topic=TopicConfig()), log, ends)
    monkeypatch.setattr(controller_service, "port_refuses", fail)
    service.carry(ProbePort(0, 1, *NOWHERE))
    assert ends.bug() is BUG


def test_a_probe_needs_no_new_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment without threads ended the controller, and with it the cluster, for good."""
    ends, asked = Ends(), queue.SimpleQueue[int]()
    log = MetadataLog(LocalStore(str(tmp_path)), records_between_snapshots=100, snapshots_kept=1)
    service = ControllerService(ClusterSettings(cluster=ClusterConfig(), topic=TopicConfig()), log, ends)
    monkeypatch.setattr(controller_service, "port_refuses", lambda host, port: asked.put(port))
    with no_threads(monkeypatch):
        for port in range(20):
            service.carry(ProbePort(0, 1, "127.0.0.1", port))
        assert {asked.get(timeout=WAIT_S) for _ in range(20)} == set(range(20))
    assert ends._ends.empty()


def test_the_log_of_a_controller_goes_on_after_a_line_that_failed() -> None:
    write = Once()
    handler = PipeHandler(lambda line: cast("None", write(line)))
    for number in range(2):
        handler._lines.put(cast("object", number))  # type: ignore[arg-type]
    assert write.done.wait(WAIT_S)


def test_a_claim_is_renewed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = ClaimKeeper(LocalStore(str(tmp_path)), Owner.here("run", os.getpid()), beat_s=0.001)
    beat = Once()
    monkeypatch.setattr(keeper, "_beat", beat)
    keeper.take()
    assert beat.done.wait(WAIT_S)
    keeper.end()


def test_keepers_are_accepted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = KeeperConnections("127.0.0.1", cast("KeeperListener", None))
    accept = Once(connections._accept)
    monkeypatch.setattr(connections, "_accept", accept)
    connections.start()
    with socket.create_connection(("127.0.0.1", connections.port), timeout=WAIT_S):
        assert accept.done.wait(WAIT_S)
    connections.close()


def test_a_controller_that_nobody_hears_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        client = ControllerClient(process, ControllerConfig(cluster={}, topic={}, metadata_dir=""))
        monkeypatch.setattr(client._reader, "_given", fail)
        client._reader.start()
        assert process.wait(WAIT_S) < 0


def test_a_controller_whose_answers_cannot_be_read_is_killed() -> None:
    """Story: it ran on, nobody could ask it for anything, and nobody started another one."""
    says = "print('not an answer', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", says], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        client = ControllerClient(process, ControllerConfig(cluster={}, topic={}, metadata_dir=""))
        client._reader.start()
        assert process.wait(WAIT_S) < 0


def test_a_filter_of_the_host_that_fails_costs_no_controller(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Story: one ValueError of a notebook's filter, and no lost broker was replaced any more."""

    def refuse(record: logging.LogRecord) -> bool:
        raise ValueError(f"I/O operation on closed file: {record.getMessage()}")

    lines = to_line(LogLine(logging.WARNING, "a line")) + to_line(ControllerFailed(1, "the end"))
    says = f"import os; os.write(1, {lines!r}); input()"
    monkeypatch.setattr(controller_client.controller_logger, "filters", [refuse])
    with subprocess.Popen([sys.executable, "-c", says], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        client = ControllerClient(process, ControllerConfig(cluster={}, topic={}, metadata_dir=""))
        client._reader.start()
        eventually(lambda: client._failed is not None, WAIT_S, "what comes after the line is read")
        assert process.poll() is None
        process.kill()
    assert "I/O operation on closed file" in capsys.readouterr().err


class NoController:
    host, port, pid, alive = "127.0.0.1", 1, 1, False
    brokers: tuple[()] = ()

    def status(self) -> NoController:
        return self


def test_the_watch_over_the_controller_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ControllerConfig(cluster={}, topic={}, metadata_dir="")
    link = ControllerLink(cast("ControllerClient", NoController()), config, ClusterConfig())
    keep = Once()
    monkeypatch.setattr(link._watch, "_given", keep)
    link.watch(lambda _: None)
    assert keep.done.wait(WAIT_S)


def test_a_schedule_of_tiering_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = TieringSchedule(cast("SparkSession", None), 1, lambda: None, lambda: "", print)  # type: ignore[arg-type,return-value]
    a_round = Once(lambda: schedule._stopping.set())
    monkeypatch.setattr(schedule, "_round", a_round)
    schedule.start()
    assert a_round.done.wait(WAIT_S)


@pytest.mark.parametrize("fails", [False, True])
def test_a_schedule_of_tiering_pauses_between_rounds(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: with no broker there, or an interval of 0, it asked the controller in a loop without a pause."""
    schedule = TieringSchedule(cast("SparkSession", None), 0, lambda: None, lambda: "", print)  # type: ignore[arg-type,return-value]
    waits: list[float] = []

    def a_round() -> None:
        if fails:
            raise NotControllerError("it is away")

    def wait(pause_s: float) -> bool:
        waits.append(pause_s)
        return len(waits) > 5

    monkeypatch.setattr(schedule, "_round", a_round)
    monkeypatch.setattr(schedule, "_is_ending", lambda: False)
    monkeypatch.setattr(schedule._stopping, "wait", wait)
    schedule._run()
    assert len(waits) == 6
    assert min(waits[1:]) >= (1 if fails else 0.1)


class NoHost:
    shared_executor = True
    trouble = ""

    def open(self, listener: object) -> None:
        del listener


def test_a_slot_of_the_launcher_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = BrokerLauncher(cast("object", NoHost()), cast("object", None), cast("object", None))  # type: ignore[arg-type]
    claim = Once(lambda _: launcher.begin_stop())
    monkeypatch.setattr(launcher, "_claim", claim)
    launcher.add_slot()
    assert claim.done.wait(WAIT_S)


def test_a_broker_is_asked_again_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = BrokerLauncher(cast("object", NoHost()), cast("object", None), cast("object", None))  # type: ignore[arg-type]
    stop = Once()
    monkeypatch.setattr(launcher, "_leave", stop)
    launcher.executor_leaving(1)
    assert stop.done.wait(WAIT_S)


def test_a_cluster_whose_end_has_failed_says_so_to_its_next_user() -> None:
    cluster = BrokerCluster.__new__(BrokerCluster)
    cluster._stopped = True
    cluster._end_failed(BUG)
    with pytest.raises(ClosedError, match="the cluster's end failed: ValueError"):
        cluster.status()
