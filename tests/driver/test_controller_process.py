"""The controller's process: it starts, answers, and ends with its driver."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from spark_broker.controller.records import ControllerEpochRecord
from spark_broker.driver.controller_client import ControllerClient
from spark_broker.driver.controller_pipe import (
    Answer,
    Command,
    ControllerConfig,
    ControllerFailed,
    LogLine,
    Started,
    from_controller,
    to_line,
)
from spark_broker.driver.controller_process import ControllerProcess, DriverPipe
from spark_broker.driver.controller_service import ControllerService
from spark_broker.driver.metadata_log import MetadataLog
from spark_broker.errors import (
    ClosedError,
    ClusterStartError,
    InvalidConfigError,
    InvalidRequestError,
    MetadataStoreError,
    NoMemoryError,
    NotControllerError,
    NoThreadError,
    RequestTimedOutError,
    SparkBrokerError,
    StaleControllerEpochError,
    UnknownServerError,
)
from tests.conftest import WaitUntil
from tests.driver.fake_broker import FakeBroker
from tests.support.no_threads import no_threads

ROOT = Path(__file__).parents[2]


def config(path: Path, **changes: object) -> ControllerConfig:
    values: dict[str, object] = {"cluster": {}, "topic": {}, "metadata_dir": str(path / "metadata")}
    return ControllerConfig(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerClient]:
    client = ControllerClient.start(config(tmp_path))
    yield client
    client.close()


def gone(pid: int) -> bool:
    """Whether the process has ended; a zombie has ended, too."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def test_a_controller_says_who_it_is_and_commits_launch_numbers(controller: ControllerClient, tmp_path: Path) -> None:
    assert controller.port > 0
    assert controller.controller_epoch == 0
    assert [controller.new_launch() for _ in range(3)] == [1, 2, 3]
    log = MetadataLog.open(str(tmp_path / "metadata"))
    assert (log.image.cluster_id, log.image.last_launch) == (controller.cluster_id, 3)


def test_brokers_are_registered_reported_lost_and_shown(controller: ControllerClient, wait_until: WaitUntil) -> None:
    launch = controller.new_launch()
    broker = FakeBroker(controller.host, controller.port, launch, "d").wait_live()
    (shown,) = controller.status().brokers
    assert (shown.id, shown.launch, shown.fenced, shown.port) == (0, launch, False, broker.request.port)
    controller.spark_loss(launch)
    wait_until(lambda: controller.status().brokers[0].fenced, "the broker is fenced")
    broker.die()


def test_brokers_are_stopped_in_order_while_other_commands_go_on(controller: ControllerClient) -> None:
    broker = FakeBroker(controller.host, controller.port, controller.new_launch(), "d").wait_live()
    left: list[tuple[int, ...]] = []
    stopper = threading.Thread(target=lambda: left.append(controller.stop_brokers(20)))
    stopper.start()
    broker.wait(lambda b: b.answers[-1].shut_down, "permission to stop")
    assert controller.status().brokers[0].in_controlled_shutdown
    broker.die()
    stopper.join(20)
    assert left == [(0,)]


def test_a_stop_that_takes_too_long_is_given_up(controller: ControllerClient) -> None:
    broker = FakeBroker(controller.host, controller.port, controller.new_launch(), "d").wait_live()
    with pytest.raises(RequestTimedOutError):
        controller.stop_broker(broker.request.launch, timeout_s=0.01)
    assert controller.new_launch() == 2
    broker.die()


def test_a_restart_takes_over_under_a_higher_epoch(tmp_path: Path) -> None:
    first = ControllerClient.start(config(tmp_path))
    first.new_launch()
    first.close()
    second = ControllerClient.start(config(tmp_path, known_cluster_ids=[first.cluster_id]))
    assert (second.cluster_id, second.controller_epoch) == (first.cluster_id, 1)
    assert second.new_launch() == 2
    second.close()


def test_a_closed_controller_is_gone_and_says_so(controller: ControllerClient) -> None:
    controller.close()
    controller.close()
    assert not controller.alive
    with pytest.raises(ClosedError):
        controller.new_launch()


def test_a_killed_controller_is_noticed(controller: ControllerClient, wait_until: WaitUntil) -> None:
    os.kill(controller.pid, signal.SIGKILL)
    wait_until(lambda: not controller.alive, "the process ends")
    with pytest.raises(NotControllerError):
        controller.new_launch(timeout_s=20)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"known_cluster_ids": ["of-another-time"]}, MetadataStoreError),
        ({"cluster": {"num.partition": "3"}}, InvalidConfigError),
        ({"metadata_dir": "memory://metadata"}, MetadataStoreError),
        ({"host": "192.0.2.1"}, ClusterStartError),
    ],
)
def test_what_keeps_a_controller_from_serving_is_a_typed_error(
    tmp_path: Path, changes: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        ControllerClient.start(config(tmp_path, **changes))


def test_a_second_controller_on_the_same_metadata_ends_the_first(tmp_path: Path, wait_until: WaitUntil) -> None:
    first = ControllerClient.start(config(tmp_path))
    second = ControllerClient.start(config(tmp_path))
    with pytest.raises(NotControllerError):
        first.new_launch()
    wait_until(lambda: not first.alive, "the deposed controller ends")
    assert second.new_launch() == 1
    first.close()
    second.close()


def test_a_deposed_controller_says_so_although_its_claim_can_be_neither_read_nor_written(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    first = ControllerClient.start(config(tmp_path))
    claim = tmp_path / "metadata" / "claim.json"
    while not claim.is_dir():  # a beat of the claim may come between
        claim.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            claim.mkdir()
    log = MetadataLog.open(str(tmp_path / "metadata"))

    log.append([ControllerEpochRecord(log.image.controller_epoch + 1, log.writer)])

    wait_until(lambda: not first.alive, "the deposed controller ends")
    assert isinstance(first.failure, StaleControllerEpochError)
    first.close()


def test_a_command_that_gets_no_thread_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ended with a traceback, and the cluster with it."""
    output = io.BytesIO()
    process = ControllerProcess(DriverPipe(output), os.getpid())
    with no_threads(monkeypatch):
        process.run_command(cast("ControllerService", None), to_line(Command(id=7, cmd="new_launch")))
    answer = from_controller(output.getvalue())
    assert isinstance(answer, Answer)
    assert (answer.id, answer.error_code) == (7, NoThreadError.code)


def code_of_failure(program: str) -> int:
    """The code of the error with which the controller of this program ends."""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    words = from_controller(ended.stdout)
    assert isinstance(words, ControllerFailed)
    return words.error_code


WITHOUT_THREADS = """
import os, sys, threading
from spark_broker.driver.controller_process import ControllerProcess, DriverPipe
process = ControllerProcess(DriverPipe(sys.stdout.buffer), os.getppid())
process.begin()
def refuse(_):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
try:
    threading.Thread().start()
except RuntimeError as error:
    process.fail(error)
"""


def test_a_controller_without_threads_says_why_it_ends() -> None:
    assert code_of_failure(WITHOUT_THREADS) == NoThreadError.code


WITHOUT_MEMORY = """
import os, sys
from spark_broker.driver import controller_process
from spark_broker.driver.controller_process import ControllerProcess, DriverPipe

def refuse(_):
    raise MemoryError
controller_process.limit_reached = refuse
process = ControllerProcess(DriverPipe(sys.stdout.buffer), os.getppid())
process.begin()
process.fail(MemoryError())
"""


def test_a_controller_that_has_no_memory_to_say_why_ends_all_the_same() -> None:
    """Story: it lived on and decided nothing, and its driver waited for it."""
    assert code_of_failure(WITHOUT_MEMORY) == NoMemoryError.code


CHILD = """
import os, sys
sys.stdin.readline()
print(sys.argv[1], flush=True)
sys.stdin.readline()
print(sys.argv[2], end="", flush=True)
status = int(sys.argv[3])
os.kill(os.getpid(), -status) if status < 0 else os._exit(status)
"""
"""A controller that ends at its first command: with these words, and by this signal or with this status."""


@pytest.mark.parametrize(
    ("said", "status", "final"),
    [
        (None, -signal.SIGKILL, None),
        (None, 1, None),
        (None, 0, None),
        (NoThreadError, 1, None),
        (NoMemoryError, 1, None),
        (StaleControllerEpochError, 1, StaleControllerEpochError),
        (MetadataStoreError, 1, MetadataStoreError),
        (UnknownServerError, 1, UnknownServerError),  # a bug
    ],
)
def test_only_a_controller_that_said_why_it_cannot_go_on_is_not_started_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: type[SparkBrokerError] | None,
    status: int,
    final: type[SparkBrokerError] | None,
) -> None:
    started = to_line(Started(port=1, cluster_id="c", controller_epoch=0)).decode().strip()
    words = "" if said is None else to_line(ControllerFailed(said.code, "why")).decode()
    child = [sys.executable, "-S", "-c", CHILD, started, words, str(status)]
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: real(child, **options))
    client = ControllerClient.start(config(tmp_path))
    with pytest.raises(NotControllerError):
        client.new_launch(timeout_s=20)
    assert client._process.wait(20) == status
    assert type(client.failure) is (type(None) if final is None else final)
    assert client.end
    client.close()


DRIVER = """
import os, sys
from spark_broker.driver.controller_client import ControllerClient
from spark_broker.driver.controller_pipe import ControllerConfig
client = ControllerClient.start(ControllerConfig(cluster={}, topic={}, metadata_dir=sys.argv[1]))
if sys.argv[2] == "fork" and os.fork() == 0:
    sys.stdout.close()
    os.read(0, 1)
    os._exit(0)
print(client.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["plain", "fork"])
def test_the_controller_ends_with_its_driver(tmp_path: Path, wait_until: WaitUntil, how: str) -> None:
    """It ends even if a forked child of the driver still holds the pipe open."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "metadata"), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    assert not gone(pid)
    driver.kill()
    driver.wait(20)
    wait_until(lambda: gone(pid), "the controller ends with its driver")
    driver.stdin.close()
    driver.stdout.close()


def test_a_line_that_is_no_command_is_answered_and_changes_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "spark_broker.driver.controller_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    lines = [to_line(config(tmp_path)), b"not json\n", b'{"id": 7, "cmd": "dance"}\n', b'{"id": 8, "cmd": "status"}\n']
    output, _ = process.communicate(b"".join(lines), timeout=60)
    messages = [from_controller(line) for line in output.splitlines()]
    started, *answers = [message for message in messages if not isinstance(message, LogLine)]
    assert isinstance(started, Started)
    assert started.port > 0
    codes = [(answer.id, answer.error_code) for answer in answers if isinstance(answer, Answer)]
    assert codes == [(-1, InvalidRequestError.code), (7, InvalidRequestError.code), (8, 0)]
    assert process.returncode == 0
    end = f"the controller, pid {process.pid}, epoch 0, ends: its driver closed it"
    assert [message.text for message in messages if isinstance(message, LogLine)][-1] == end
