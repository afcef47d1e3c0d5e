"""The controller's shell over real streams: it commits before it notifies; sessions, probes and failures."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pyarrow as pa
import pytest

from spark_broker.config import load_cluster_settings
from spark_broker.driver import controller_loop
from spark_broker.driver.controller_service import ControllerService
from spark_broker.driver.metadata_claim import Owner
from spark_broker.driver.metadata_log import MetadataLog
from spark_broker.errors import (
    DuplicateBrokerRegistrationError,
    InvalidConfigError,
    InvalidRequestError,
    InvalidSchemaError,
    NotControllerError,
    RequestTimedOutError,
    SparkBrokerError,
    StaleControllerEpochError,
    StaleLaunchError,
    TopicAlreadyExistsError,
    UnknownServerError,
)
from spark_broker.protocol.messages import (
    AlterTopicConfigRequest,
    CallResponse,
    CreateTopicRequest,
    EnsureOffsetsTopicRequest,
    HeartbeatRequest,
    Message,
    MetadataRequest,
    MetadataResponse,
    RegisterBrokerResponse,
    StopBroker,
)
from spark_broker.protocol.schema import DEFAULT_SCHEMA, schema_to_bytes
from spark_broker.protocol.wire import Buffer
from spark_broker.transport import answer_room
from spark_broker.transport.client import Connection
from spark_broker.transport.server_stream import ServerStream
from tests.driver.fake_broker import HEARTBEAT_S, FakeBroker

HOST = "127.0.0.1"


class Running:
    """A service on loopback, and the brokers that were started on it."""

    def __init__(self, path: Path, *, log_dirs: str = "", **values: object) -> None:
        self.path = path
        self.failures: list[BaseException] = []
        self.failed = threading.Event()
        named = {name.replace("_", "."): value for name, value in values.items()}
        settings, log = load_cluster_settings(named), MetadataLog.open(str(path))
        self.service = ControllerService(settings, log, self._fail, log_dirs=log_dirs)
        self.service.start(HOST, 0, Owner.here("test", os.getpid()))
        self.connection = Connection(HOST, self.service.port)
        self.brokers: list[FakeBroker] = []

    def _fail(self, error: BaseException) -> None:
        self.failures.append(error)
        self.failed.set()

    def broker(self, directory: str = "", **changes: object) -> FakeBroker:
        launch = self.service.new_launch(10)
        broker = FakeBroker(HOST, self.service.port, launch, directory or f"directory-{launch}", **changes)
        self.brokers.append(broker)
        return broker

    def again(self, broker: FakeBroker) -> FakeBroker:
        """The same process opens another session."""
        again = FakeBroker(HOST, self.service.port, broker.request.launch, "", **_same_process(broker))
        self.brokers.append(again)
        return again

    def live_brokers(self, count: int) -> list[FakeBroker]:
        return [self.broker().wait_live() for _ in range(count)]

    def call(self, request: Message) -> CallResponse:
        return self.connection.call(request, timeout_ms=20_000)

    def close(self) -> None:
        """Close the service first, because it would fence brokers that die before it, and record that."""
        self.service.close()
        for broker in self.brokers:
            broker.die()
        self.connection.close()


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a controller on the test's metadata directory."""
    running: list[Running] = []

    def begin(log_dirs: str = "", **values: object) -> Running:
        running.append(Running(tmp_path / "metadata", log_dirs=log_dirs, **values))
        return running[-1]

    yield begin
    for controller in running:
        controller.close()


def test_a_broker_gets_its_id_then_a_snapshot_then_every_change(start: Start) -> None:
    running = start()
    first, second = running.live_brokers(2)
    assert (first.id, second.id) == (0, 1)
    running.call(CreateTopicRequest("t", 1, 2, b"", {}))
    for broker in (first, second):
        broker.wait(lambda b: b.image == running.service.image, "the broker's metadata equals the controller's")
        assert broker.updates[0].snapshot
        assert not any(update.snapshot for update in broker.updates[1:])


def test_what_brokers_hear_is_in_the_log_already(start: Start) -> None:
    running = start()
    (broker,) = running.live_brokers(1)
    running.call(CreateTopicRequest("t", 1, 1, b"", {}))
    broker.wait(lambda b: b.partition(), "the topic")
    assert MetadataLog.open(str(running.path)).image.topic("t") == broker.image.topic("t")


def test_a_killed_brokers_leadership_moves_at_once(start: Start) -> None:
    running = start(broker_session_timeout_ms=600_000, controller_reconnect_grace_ms=600_000)
    brokers = running.live_brokers(3)
    running.call(CreateTopicRequest("t", 1, 3, b"", {}))
    brokers[1].wait(lambda b: b.partition(), "the topic")
    brokers[0].die()
    brokers[1].wait(lambda b: (s := b.partition()) and s.leader == 1 and set(s.isr) == {1, 2}, "an election")


def test_a_broker_whose_port_answers_may_come_back_to_its_session(start: Start) -> None:
    running = start(broker_session_timeout_ms=600_000, controller_reconnect_grace_ms=600_000)
    broker, other = running.live_brokers(2)
    epoch = running.service.image.brokers[0].epoch
    broker.end_stream()
    again = running.again(broker).wait_live()
    assert (again.id, running.service.image.brokers[0].epoch) == (0, epoch)
    assert other.image.brokers[0].live


def _same_process(broker: FakeBroker) -> dict[str, object]:
    return {
        "directory_id": broker.request.directory_id,
        "incarnation": broker.request.incarnation,
        "executor_id": broker.request.executor_id,
        "port": broker.request.port,
        "broker_id": broker.id,
    }


def test_a_broker_that_does_not_come_back_is_fenced_after_the_grace(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "spark_broker.driver.controller_service")
    running = start(broker_session_timeout_ms=600_000, controller_reconnect_grace_ms=200)
    broker, other = running.live_brokers(2)
    broker.end_stream()
    # On a busy machine the controller may be late itself. Then it must not fence the broker, and the test tries again.
    while _fenced_or_in_doubt(other, caplog) == "in doubt":
        caplog.clear()
        broker = running.again(broker).wait_live()
        broker.end_stream()


def _fenced_or_in_doubt(other: FakeBroker, caplog: pytest.LogCaptureFixture) -> str:
    def in_doubt() -> bool:
        return "brokers [0] are in doubt" in caplog.text

    other.wait(lambda b: b.image.brokers[0].fenced or in_doubt(), "the end of the grace")
    return "in doubt" if in_doubt() else "fenced"


def test_sparks_loss_signal_ends_the_session_of_its_launch(start: Start) -> None:
    running = start(broker_session_timeout_ms=600_000)
    broker, other = running.live_brokers(2)
    running.service.spark_loss(broker.request.launch)
    other.wait(lambda b: b.image.brokers[0].fenced, "the fence")
    broker.wait(lambda b: b.error is not None, "the end of its session")
    assert running.service.image.brokers[1].live


def test_a_later_launch_of_a_directory_supersedes_the_session_of_the_earlier_one(start: Start) -> None:
    running = start()
    zombie = running.broker("d").wait_live()
    replacement = running.broker("d", broker_id=0).wait_live()
    zombie.wait(lambda b: b.stops and b.stops[-1].superseded, "the zombie is told to exit")
    assert replacement.id == zombie.id == 0


def test_a_broker_hears_why_its_session_was_closed_however_late_that_is_sent(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats go on meanwhile. The controller's handler saw them and returned, and the stream was gone."""
    send, never = ServerStream.send, threading.Event()

    def late(stream: ServerStream, message: Message, *payload: Buffer) -> None:
        if isinstance(message, StopBroker):
            never.wait(10 * HEARTBEAT_S)
        send(stream, message, *payload)

    monkeypatch.setattr(ServerStream, "send", late)
    running = start()
    zombie = running.broker("d").wait_live()
    running.broker("d", broker_id=0).wait_live()
    zombie.wait(lambda b: b.error is not None, "the end of its session")
    assert [stop.superseded for stop in zombie.stops] == [True]
    assert isinstance(zombie.error, StaleLaunchError)


def test_a_refused_registration_is_a_typed_error_at_the_broker(start: Start) -> None:
    running = start()
    running.broker(executor_id="one").wait_live()
    second = running.broker(executor_id="one")
    second.wait(lambda b: b.error is not None, "the refusal")
    assert isinstance(second.error, DuplicateBrokerRegistrationError)


def test_brokers_leave_in_order_and_the_asker_hears_of_it(start: Start) -> None:
    running = start()
    brokers = running.live_brokers(3)
    running.call(CreateTopicRequest("t", 3, 3, b"", {}))
    done: list[tuple[int, ...]] = []
    stopper = threading.Thread(target=lambda: done.append(running.service.stop_brokers(None, 20)))
    stopper.start()
    for broker in brokers:
        broker.wait(lambda b: b.answers[-1].shut_down, "permission to stop")
        broker.die()
    stopper.join(20)
    assert done == [(0, 1, 2)]
    topic = running.service.image.topic("t")
    assert topic is not None
    assert all(len(p.isr) == 3 for p in topic.partitions)


def test_an_error_of_a_call_reaches_its_caller_with_its_type(start: Start) -> None:
    running = start()
    running.live_brokers(1)
    running.call(CreateTopicRequest("t", 1, 1, b"", {}))
    with pytest.raises(TopicAlreadyExistsError):
        running.call(CreateTopicRequest("t", 1, 1, b"", {}))
    with pytest.raises(InvalidSchemaError):
        running.call(CreateTopicRequest("u", 1, 1, b"no schema", {}))
    assert not running.failures


def test_the_default_schema_is_kafkas_record_and_a_typed_one_is_kept(start: Start) -> None:
    running = start()
    running.live_brokers(1)
    typed = pa.schema([pa.field("dest", pa.string()), pa.field("delay", pa.float64())])
    running.call(CreateTopicRequest("default", 1, 1, b"", {}))
    running.call(CreateTopicRequest("typed", 1, 1, schema_to_bytes(typed), {"key.columns": "dest"}))
    metadata = running.call(MetadataRequest())
    assert isinstance(metadata, MetadataResponse)
    schemas = {topic.name: topic.schemas for topic in metadata.topics}
    assert schemas == {"default": [schema_to_bytes(DEFAULT_SCHEMA)], "typed": [schema_to_bytes(typed)]}


@pytest.mark.parametrize(
    "config",
    [
        *({"key.columns": name} for name in ("dst", "delay", "price", "tags", "place", "counts")),
        *({"timestamp.column": name} for name in ("dest", "x", "day", "price")),
    ],
)
def test_a_setting_that_names_an_unfit_column_is_refused(start: Start, config: dict[str, str]) -> None:
    running = start()
    running.live_brokers(1)
    kinds = {
        "dest": pa.string(),
        "delay": pa.float64(),
        "price": pa.decimal128(10, 2),
        "day": pa.date32(),
        "tags": pa.list_(pa.string()),
        "place": pa.struct([("x", pa.int32())]),
        "counts": pa.map_(pa.string(), pa.int32()),
    }
    schema = schema_to_bytes(pa.schema(list(kinds.items())))
    with pytest.raises(InvalidConfigError):
        running.call(CreateTopicRequest("t", 1, 1, schema, config))
    running.call(CreateTopicRequest("t", 1, 1, schema, {}))
    with pytest.raises(InvalidConfigError):
        running.call(AlterTopicConfigRequest("t", dict(config)))


def test_calls_that_wait_for_a_decision_hold_up_nothing_behind_them(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker's session has the same connection: its heartbeats would not be read."""
    monkeypatch.setattr(answer_room, "MAKING_S", 1e9)
    running = start()
    running.live_brokers(1)
    calls = 2 * answer_room.MAKING_MAX
    all_wait = threading.Barrier(calls)
    ask = running.service._ask

    def late(*arguments: Any, **options: Any) -> Any:
        all_wait.wait(20)
        return ask(*arguments, **options)

    monkeypatch.setattr(running.service, "_ask", late)
    with ThreadPoolExecutor(calls) as pool:
        answers = [pool.submit(running.call, MetadataRequest()) for _ in range(calls)]
        assert all(isinstance(answer.result(), MetadataResponse) for answer in answers)


def test_the_offsets_topic_is_made_by_whoever_asks_first(start: Start) -> None:
    running = start(offsets_topic_num_partitions=2)
    running.live_brokers(1)
    running.call(EnsureOffsetsTopicRequest())
    running.call(EnsureOffsetsTopicRequest())
    topic = running.service.image.topic("__consumer_offsets")
    assert topic is not None
    assert (len(topic.partitions), topic.internal) == (2, True)


def test_a_session_that_does_not_begin_with_a_registration_is_refused(start: Start) -> None:
    running = start()
    stream = running.connection.open_stream("session")
    stream.send(HeartbeatRequest(0, 0, 0, ready=True))
    with pytest.raises(InvalidRequestError):
        stream.receive(timeout_ms=10_000)


def test_many_calls_at_once_share_files(start: Start) -> None:
    running = start()
    running.live_brokers(1)
    before = len(list(running.path.glob("*.log")))
    barrier = threading.Barrier(16)
    errors: list[SparkBrokerError] = []

    def create(number: int) -> None:
        barrier.wait()
        try:
            running.call(CreateTopicRequest(f"t{number}", 1, 1, b"", {}))
        except SparkBrokerError as error:
            errors.append(error)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(running.service.image.topics) == 16
    assert 1 <= len(list(running.path.glob("*.log"))) - before <= 16


def test_a_deposed_controller_fails_and_tells_nobody_of_its_decision(start: Start) -> None:
    old = start()
    (broker,) = old.live_brokers(1)
    new = start()
    next_offset = broker.image.next_offset
    with pytest.raises(NotControllerError):
        old.call(CreateTopicRequest("t", 1, 1, b"", {}))
    assert old.failed.wait(20)
    assert isinstance(old.failures[0], StaleControllerEpochError)
    assert broker.image.next_offset == next_offset
    assert new.service.image.controller_epoch == old.service.image.controller_epoch + 1


def test_a_deposed_controller_tells_nobody_what_its_successor_may_have_changed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of a topic's table relies on it: deleted rows would be missing, and nobody would say so."""
    monkeypatch.setattr(controller_loop, "LOOK_S", 3600.0)
    old = start()
    before = old.call(MetadataRequest(certain=True))
    start()
    assert old.call(MetadataRequest()) == before
    with pytest.raises(NotControllerError):
        old.call(MetadataRequest(certain=True))
    assert old.failed.wait(20)
    assert isinstance(old.failures[0], StaleControllerEpochError)


def test_a_certain_answer_waits_while_the_metadata_store_fails(start: Start, tmp_path: Path) -> None:
    running = start(request_timeout_ms=1000)
    away = running.path.rename(tmp_path / "away")
    with pytest.raises(RequestTimedOutError, match="metadata store fails"):
        running.call(MetadataRequest(certain=True))
    away.rename(running.path)
    assert isinstance(running.call(MetadataRequest(certain=True)), MetadataResponse)
    assert not running.failures


def test_a_deposed_controller_lets_its_brokers_go_though_it_has_nothing_to_write(start: Start) -> None:
    """Simulator, seeds 100251 and 104293: it answered heartbeats for ever, and its broker never led again."""
    old = start()
    old.live_brokers(1)
    start()
    assert old.failed.wait(20)
    assert isinstance(old.failures[0], StaleControllerEpochError)


def test_a_restarted_controller_brings_everything_back(start: Start) -> None:
    first = start()
    brokers = [first.broker(f"d{number}").wait_live() for number in range(2)]
    first.call(CreateTopicRequest("t", 4, 2, b"", {}))
    before = first.service.image
    first.close()
    second = start()
    assert second.service.image.cluster_id == before.cluster_id
    again = [
        second.broker(f"d{number}", broker_id=broker.id, cluster_id=before.cluster_id, start_kind="process_crash")
        for number, broker in enumerate(brokers)
    ]
    for broker in again:
        broker.wait_live()
        broker.wait(lambda b: all(state.leader >= 0 for _, _, state in b.image.partitions()), "leaders")
    topic = second.service.image.topic("t")
    assert topic is not None
    assert all(len(p.isr) == 2 for p in topic.partitions)


def test_live_brokers_go_on_while_the_metadata_store_fails(start: Start, tmp_path: Path) -> None:
    """The outage lasts longer than a session without answers."""
    running = start(broker_session_timeout_ms=1500, broker_heartbeat_interval_ms=200, request_timeout_ms=1000)
    brokers = running.live_brokers(2)
    epochs = [broker.epoch for broker in running.service.image.brokers.values()]
    away = running.path.rename(tmp_path / "away")
    with pytest.raises(RequestTimedOutError, match="metadata store fails"):
        running.call(CreateTopicRequest("t", 1, 2, b"", {}))

    began_ms = time.monotonic() * 1000
    for broker in brokers:
        broker.wait(lambda b: b.answers[-1].sent_ms > began_ms + 3000, "answers for twice the session time-out")
        assert not any(answer.fenced for answer in broker.answers if answer.sent_ms > began_ms)
    away.rename(running.path)
    brokers[0].wait(lambda b: b.partition(), "the topic that was asked for")

    assert not running.failures
    assert [broker.epoch for broker in running.service.image.brokers.values()] == epochs


def test_a_broker_that_dies_while_the_metadata_store_fails_is_fenced_when_it_works_again(
    start: Start, tmp_path: Path
) -> None:
    running = start(broker_session_timeout_ms=600_000, broker_heartbeat_interval_ms=200)
    brokers = running.live_brokers(3)
    running.call(CreateTopicRequest("t", 1, 3, b"", {}))
    brokers[1].wait(lambda b: b.partition(), "the topic")
    away = running.path.rename(tmp_path / "away")

    brokers[0].die()
    began_ms = time.monotonic() * 1000
    brokers[1].wait(lambda b: b.answers[-1].sent_ms > began_ms + 2000, "answers while the store fails")
    assert (state := brokers[1].partition()) is not None
    assert state.leader == 0
    away.rename(running.path)

    brokers[1].wait(lambda b: (s := b.partition()) and s.leader == 1 and set(s.isr) == {1, 2}, "an election")


def test_a_broker_an_hour_behind_is_fenced_with_the_reason_until_its_clock_is_right(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    running = start()
    *others, wrong = running.live_brokers(3)
    answered = [len(broker.answers) for broker in others]
    with caplog.at_level(logging.WARNING):
        wrong.skew_ms = -3_600_000
        wrong.wait(lambda b: b.answers[-1].fenced, "the broker is fenced")
    assert "behind most clocks" in wrong.answers[-1].reason
    assert [r.message for r in caplog.records if f"fenced broker {wrong.id}" in r.message and "NTP" in r.message]
    wrong.skew_ms = 0
    wrong.wait_live()
    assert wrong.answers[-1].reason == ""
    for broker, count in zip(others, answered, strict=True):
        assert not any(answer.fenced for answer in broker.answers[count:])


def test_a_bug_in_a_call_is_answered_and_the_controller_goes_on(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Story: what one peer sent ended the controller for everybody."""
    running = start()

    def raise_bug(*_: object) -> NoReturn:
        raise TypeError("nobody has thought of this value")

    with monkeypatch.context() as patched:
        patched.setattr("spark_broker.controller.controller.answer", raise_bug)
        with pytest.raises(UnknownServerError, match="TypeError: nobody has thought"):
            running.connection.call(MetadataRequest(None), timeout_ms=30_000)
    assert "raise_bug" in caplog.text, "the log has the traceback"
    assert isinstance(running.connection.call(MetadataRequest(None), timeout_ms=30_000), MetadataResponse)
    assert not running.failures


@pytest.mark.parametrize(
    ("directory", "taken"),
    [("/data/logs/broker-7", True), ("", True), ("/data/logs/x/broker-7", False), ("/srv/other/broker-7", False)],
)
def test_a_broker_names_a_directory_in_log_dirs_as_its_own_and_no_other(
    start: Start, directory: str, taken: bool
) -> None:
    """Readers on the broker's machine open what is in there."""
    running = start(log_dirs="/data/logs")
    request = msgspec.structs.replace(running.broker().request, launch=running.service.new_launch(10))
    request = msgspec.structs.replace(request, directory_id="another", executor_id="other", directory=directory)
    stream = running.connection.open_stream("session")
    stream.send(request)
    if taken:
        assert isinstance(stream.receive(timeout_ms=30_000)[0], RegisterBrokerResponse)
    else:
        with pytest.raises(InvalidRequestError, match=r"is not in log\.dirs, /data/logs"):
            stream.receive(timeout_ms=30_000)
    stream.close()
