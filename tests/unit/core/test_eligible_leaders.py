"""KIP-966 with replicas: an eligible replica outside the ISR has every acknowledged batch, and can lead."""

from __future__ import annotations

import pytest

from spark_broker.errors import NotEnoughReplicasError
from tests.unit.core.harness import LAG_MAX_MS, Cluster


def below_the_minimum() -> Cluster:
    """Brokers 2 and 3 were lost one after the other; 2 is eligible."""
    cluster = Cluster(min_insync_replicas=2)
    cluster.append(1, 1)
    cluster.replicate()
    cluster.controller.fence(3)
    cluster.deliver_all()
    cluster.append(1, 2)
    cluster.replicate(2)
    cluster.crash(2)
    cluster.controller.fence(2)
    cluster.deliver_all()
    assert (cluster.controller.assignment.isr, cluster.controller.metadata.elr) == ((1,), (2,))
    return cluster


def test_nothing_is_committed_below_the_minimum_and_who_left_keeps_everything() -> None:
    cluster = below_the_minimum()
    before = cluster.replica(1).high_watermark
    outcome = cluster.append(1, 3, acks=1)
    assert outcome.answered
    with pytest.raises(NotEnoughReplicasError):
        cluster.append(1, 4)
    assert cluster.replica(1).high_watermark == before == 2
    assert cluster.values(2) == [1, 2]


def test_a_follower_that_lacks_what_is_committed_leaves_the_isr_and_is_not_eligible() -> None:
    """The follower was rebuilt while it was an ISR member."""
    cluster = Cluster(min_insync_replicas=3)
    cluster.append(1, 1)
    cluster.replicate()
    cluster.crash(3)
    node = cluster.nodes[3]
    node.log.truncate_to(0)
    cluster.start(3)
    cluster.deliver_all()
    request = cluster.ask(3)
    assert request is not None
    assert cluster.serve(request) is not None  # the answer is lost
    cluster.tick(1)
    cluster.decide(1)
    assert (cluster.controller.assignment.isr, cluster.controller.metadata.elr) == ((1, 2), ())


def test_a_follower_that_is_only_slow_leaves_the_isr_and_is_eligible() -> None:
    cluster = Cluster(min_insync_replicas=3)
    cluster.append(1, 1)
    cluster.replicate()
    cluster.append(1, 2)
    cluster.tick(LAG_MAX_MS + 1)
    cluster.fetch(2)
    cluster.decide(1)
    assert 3 in cluster.controller.metadata.elr
