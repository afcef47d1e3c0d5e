"""The nest of `local[N]`: several brokers' processes under one task, told apart by their launch."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from spark_broker.broker.spec import FAILED, LOST, STOPPED, BrokerSpec
from spark_broker.driver.nest_task import MAX_LINE_BYTES, BrokerEnded, EndBroker, Lines, Nest, StartBroker
from spark_broker.errors import ERRORS, InvalidRequestError
from tests.support.waiting import eventually


class Driver:
    """The driver's end of a nest that runs in a thread of this process."""

    def __init__(self, directory: Path, entry: str) -> None:
        self.directory = directory
        self._socket, far_end = socket.socketpair()
        self._socket.settimeout(30)
        self._far_end = far_end
        self._received: list[BrokerEnded] = []
        self._lines = Lines()
        self._thread = threading.Thread(target=Nest(far_end, entry).run, name="nest", daemon=True)
        self._thread.start()

    def start(self, launch: int) -> None:
        spec = BrokerSpec(
            cluster_id="test",
            controller_host="127.0.0.1",
            controller_port=1,
            launch=launch,
            log_dirs=str(self.directory),
            host="127.0.0.1",
            rack=None,
            executor_id="driver",
            settings={},
            topic_defaults={},
        )
        self._send(StartBroker(spec))

    def kill(self, launch: int) -> None:
        self._send(EndBroker(launch))

    def _send(self, order: StartBroker | EndBroker) -> None:
        self._socket.sendall(msgspec.json.encode(order) + b"\n")

    def pid(self, launch: int) -> int:
        """Once its stand-in has announced itself."""
        path = self.directory / f"launch-{launch}"
        eventually(path.exists, what=f"launch {launch}")
        return int(msgspec.json.decode(path.read_bytes())["pid"])

    def next_end(self) -> BrokerEnded:
        while not self._received:
            lines = self._lines.feed(self._socket.recv(65_536))
            self._received += [msgspec.json.decode(line, type=BrokerEnded) for line in lines]
        return self._received.pop(0)

    def close(self) -> None:
        self._socket.close()
        self._thread.join(30)
        self._far_end.close()
        assert not self._thread.is_alive()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    made = Driver(tmp_path, "tests.support.stand_in_broker:run")
    yield made
    made.close()


def test_each_launch_has_a_process_of_its_own(driver: Driver) -> None:
    driver.start(1)
    driver.start(2)

    assert len({driver.pid(1), driver.pid(2), os.getpid()}) == 3


def test_a_killed_broker_is_reported_and_its_neighbour_lives_on(driver: Driver) -> None:
    driver.start(1)
    driver.start(2)
    os.kill(driver.pid(1), signal.SIGKILL)

    ended = driver.next_end()

    assert (ended.launch, ended.outcome.reason) == (1, LOST)
    assert "-9" in ended.outcome.error_message
    os.kill(driver.pid(2), 0)


def test_the_driver_can_end_a_launch_by_force(driver: Driver) -> None:
    driver.start(7)
    driver.pid(7)

    driver.kill(7)

    assert driver.next_end().launch == 7


def test_a_broker_that_left_in_order_says_so(driver: Driver) -> None:
    driver.start(1)
    driver.pid(1)

    (driver.directory / "stop-1").touch()

    assert driver.next_end().outcome.reason == STOPPED


def test_when_the_driver_closes_the_socket_no_broker_is_left(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "tests.support.stand_in_broker:run")
    driver.start(1)
    pid = driver.pid(1)

    driver.close()

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ("tests.support.stand_in_broker:fail_typed", "INCONSISTENT_CLUSTER_ID"),
        ("tests.support.stand_in_broker:fail_on_disk", "KAFKA_STORAGE"),
        ("tests.support.stand_in_broker:fail_by_a_bug", "UNKNOWN_SERVER"),
    ],
)
def test_what_kept_a_broker_from_running_reaches_the_driver_as_a_typed_error(
    tmp_path: Path, entry: str, error: str
) -> None:
    driver = Driver(tmp_path, entry)
    driver.start(1)

    outcome = driver.next_end().outcome

    assert outcome.reason == FAILED
    assert ERRORS[outcome.error_code](outcome.error_message).name == error
    driver.close()


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory() -> None:
    lines = Lines()
    lines.feed(b"x" * MAX_LINE_BYTES)

    with pytest.raises(InvalidRequestError):
        lines.feed(b"x")
