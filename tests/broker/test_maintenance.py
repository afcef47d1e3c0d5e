"""What a broker does from time to time, on its real replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_broker.broker.maintenance import TICK_S, Maintenance
from spark_broker.config import TopicConfig
from spark_broker.errors import NotLeaderOrFollowerError, RequestTimedOutError
from tests.broker.rig import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, brokers=2, topic=TopicConfig(min_insync_replicas=2))
    rig.publish()
    yield rig
    rig.stop()


def test_an_append_that_no_follower_copies_is_refused_at_its_deadline_and_others_wait_on(rig: Rig) -> None:
    leader = rig.brokers[0]
    maintenance = Maintenance(leader.manager, rig.settings.cluster, leader.bugs.append)
    maintenance.begin(0.0)
    leader.append(b"copied", epoch=0).result(20)
    rig.brokers[1].stop()
    late = leader.append(b"late", epoch=0, timeout_ms=0)
    waiting = leader.append(b"waiting", epoch=0)

    maintenance.run_due(TICK_S)

    with pytest.raises(RequestTimedOutError):
        late.result(0)
    assert not waiting.done()
    for _ in range(2):
        assert list(leader.manager.take_waiting()) == [leader.partition]
    rig.publish(0, leader=1, leader_epoch=1, partition_epoch=1)
    with pytest.raises(NotLeaderOrFollowerError):
        waiting.result(20)
    assert list(leader.manager.take_waiting()) == []
    assert leader.bugs == []
