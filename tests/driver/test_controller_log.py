"""The controller's log is the driver's: its lines, and that no thread waits for it."""

from __future__ import annotations

import json
import logging
import sys
import threading
from pathlib import Path

import pytest

from spark_broker.broker.log_format import JSON, TEXT, formatter, log_fields
from spark_broker.driver import controller_log
from spark_broker.driver.controller_client import ControllerClient
from spark_broker.driver.controller_log import PipeHandler
from spark_broker.driver.controller_pipe import ControllerConfig, LogLine, from_line, to_line
from tests.driver.fake_broker import FakeBroker
from tests.support.waiting import eventually

CONTROLLER = "spark_broker.controller"


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records if record.name == CONTROLLER]


def start(tmp_path: Path, level: str = "INFO") -> ControllerClient:
    return ControllerClient.start(
        ControllerConfig(cluster={}, topic={}, metadata_dir=str(tmp_path / "metadata"), log_level=level)
    )


def test_every_registration_and_fence_is_a_line_of_the_drivers_log_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", CONTROLLER)
    controller = start(tmp_path)
    launch = controller.new_launch()
    broker = FakeBroker(controller.host, controller.port, launch, "d").wait_live()
    controller.spark_loss(launch)

    fence = f"fenced broker 0 of launch {launch}: Spark reported its executor or task as lost"
    eventually(lambda: (logging.WARNING, fence) in said(caplog), 20, "the fence")
    registered = f"broker 0 of launch {launch} registered (clean start), broker epoch 3: session "
    assert [text for level, text in said(caplog) if level == logging.INFO and text.startswith(registered)]
    broker.die()
    controller.close()


def test_an_orderly_end_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", CONTROLLER)
    controller = start(tmp_path)
    broker = FakeBroker(controller.host, controller.port, controller.new_launch(), "d").wait_live()
    stopper = threading.Thread(target=controller.stop_brokers, args=(20,))
    stopper.start()
    broker.wait(lambda one: one.answers[-1].shut_down, "permission to stop")
    broker.die()
    stopper.join(20)

    eventually(lambda: (logging.INFO, "fenced broker 0 of launch 1: it stopped in order") in said(caplog), 20)
    controller.close()


def test_the_level_of_the_log_is_a_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", CONTROLLER)
    controller = start(tmp_path, "WARNING")
    launch = controller.new_launch()
    broker = FakeBroker(controller.host, controller.port, launch, "d").wait_live()
    controller.spark_loss(launch)

    eventually(lambda: said(caplog), 20, "the fence")
    assert {level for level, _ in said(caplog)} == {logging.WARNING}
    broker.die()
    controller.close()


def test_a_driver_that_reads_nothing_holds_nobody_up_and_hears_later_how_much_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller_log, "MAX_WAITING_LINES", 10)
    reads, written = threading.Event(), []

    def write(line: LogLine) -> None:
        reads.wait(20)
        written.append(line)

    handler = PipeHandler(write)
    for number in range(100):
        handler.handle(logging.LogRecord("x", logging.INFO, "f", 1, "line %d", (number,), None))
    reads.set()
    handler.drain()

    lines = [line.text for line in written if line.level == logging.INFO]
    assert lines[:10] == [f"line {number}" for number in range(10)]
    assert len(lines) < 20
    assert any("lines are left out" in line.text for line in written)


def test_a_traceback_of_the_controller_follows_its_line_in_the_drivers_log(caplog: pytest.LogCaptureFixture) -> None:
    """A message is one line. A traceback that were a part of it would be, too, and nobody could read it."""
    sent: list[LogLine] = []
    handler = PipeHandler(lambda line: sent.append(from_line(to_line(line).rstrip(), LogLine)))
    try:
        raise ValueError("out of order")
    except ValueError:
        handler.handle(logging.LogRecord("x", logging.ERROR, "f", 1, "it failed: %s", ("so",), sys.exc_info()))
    handler.drain()

    (line,) = sent
    log_fields(logging.getLogger(CONTROLLER), line.level, line.text, line.fields, line.traceback)
    (record,) = caplog.records
    assert record.filename == Path(__file__).name
    first, *trace = formatter(TEXT, "%(message)s").format(record).split("\n")
    assert (first, trace[0], trace[-1]) == (
        *("it failed: so", "Traceback (most recent call last):", "ValueError: out of order"),
    )
    assert json.loads(formatter(JSON).format(record))["error"] == "\n".join(trace)
