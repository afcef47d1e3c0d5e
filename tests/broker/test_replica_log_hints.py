"""Hints that a broker saves about its replicas: it can do without damaged ones."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from spark_broker.controller.image import EMPTY_IMAGE
from spark_broker.storage.checkpoints import HIGH_WATERMARKS_FILE
from tests.broker.rig import KEY, Rig, RigBroker


def test_damaged_high_watermarks_stop_no_broker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are hints: the replicas learn them again, and the next checkpoint replaces the file."""
    rig = Rig(tmp_path, brokers=1)
    broker = rig.brokers[0]
    mark = {KEY: 5}
    broker.directory.write_high_watermarks(mark)
    broker.stop()
    path = broker.directory.path / HIGH_WATERMARKS_FILE
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        again = RigBroker(tmp_path, 0, rig.settings)
    assert HIGH_WATERMARKS_FILE in caplog.text
    again.manager.apply(EMPTY_IMAGE)
    again.manager.save_high_watermarks()
    assert again.directory.read_high_watermarks() == {}
    again.stop()
