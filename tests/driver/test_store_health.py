"""The driver's log says how the metadata store is, and its last line is the truth."""

from __future__ import annotations

import logging
import time

import pytest

from spark_broker.driver.store_health import StoreHealth


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_who_waits_is_late_and_the_store_has_answered_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    """Story: a store that was away came back, and the log ended with "the metadata store fails"."""
    health, began = StoreHealth("store"), time.monotonic()
    health.hangs(began)
    health.works()
    health.hangs(began)
    assert health.trouble == ""
    fails, works = lines(caplog)
    assert "the metadata store fails (store: no answer for" in fails
    assert works.startswith("the metadata store works again")


def test_a_later_wait_is_another_one(caplog: pytest.LogCaptureFixture) -> None:
    health = StoreHealth("store")
    health.works()
    health.hangs(time.monotonic())
    assert health.trouble.startswith("no answer for")
    assert len(lines(caplog)) == 1


def test_a_reason_that_the_store_gave_is_not_replaced_by_its_silence() -> None:
    health = StoreHealth("store")
    health.fails("No space left on device")
    health.hangs(time.monotonic())
    assert health.trouble == "No space left on device"
