"""A broker tells how far its replicas reach only once its directory remembers which metadata has asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from spark_broker.controller.image import MetadataImage
from spark_broker.controller.lineage import NUMBERS_SPARED
from spark_broker.errors import StorageFullError
from spark_broker.model import NO_LEADER
from spark_broker.protocol.messages import MetadataSeen
from spark_broker.storage.directory import LogDirectory
from tests.broker.rig import Rig


def accepted(rig: Rig) -> MetadataImage:
    """Metadata that an operator has accepted although it may be older: every replica is to be compared."""
    state = dataclasses.replace(rig.state, isr=(), leader=NO_LEADER, leader_epoch=NUMBERS_SPARED)
    return dataclasses.replace(rig.image(state), next_offset=NUMBERS_SPARED + 7)


def test_nothing_is_told_before_an_acceptance_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the same copy was accepted again, and two batches got one offset and epoch, as nobody remembered."""
    rig = Rig(tmp_path, 1)
    manager, directory = rig.brokers[0].manager, rig.brokers[0].directory
    rig.publish()

    def full(_: LogDirectory, seen: MetadataSeen) -> None:
        raise StorageFullError("full")

    with monkeypatch.context() as patch:
        patch.setattr(LogDirectory, "write_seen", full)
        manager.apply(accepted(rig))
        assert manager.log_ends() == []
        manager.retry()
        assert manager.log_ends() == []
    manager.retry()
    assert [(end.partition, end.leader_epoch) for end in manager.log_ends()] == [(0, NUMBERS_SPARED)]
    seen = directory.read_seen()
    assert seen is not None
    assert seen.next_offset == NUMBERS_SPARED + 7
    rig.stop()
