"""Outages of the metadata store in the simulator: they happen where a schedule has them, and end no process."""

from __future__ import annotations

from tests.sim.test_findings import cluster, run_until


def test_an_outage_alone_fences_nobody_and_elects_nobody() -> None:
    """The outage lasts five session timeouts, while a decision waits for the store."""
    world = cluster()
    before, elections = dict(world.invariants.image.brokers), world.trace.counts.get("elections", 0)
    topics = len(world.invariants.image.topics)
    session_ms = world.settings.cluster.broker_session_timeout_ms
    world.store.fails_until_ms = until_ms = world.scheduler.now_ms + 5 * session_ms

    world.call_controller(world.new_topic_request(), "create topic")
    run_until(world, lambda: world.scheduler.now_ms > until_ms + session_ms)

    assert len(world.invariants.image.topics) == topics + 1
    assert dict(world.invariants.image.brokers) == before
    assert world.trace.counts.get("elections", 0) == elections
