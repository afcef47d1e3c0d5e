"""Whose log directory a launch may take over."""

from __future__ import annotations

import pytest

from spark_broker.broker.spec import BrokerSpec


def spec(launch: int = 9, replaces: tuple[int, ...] = (), earlier_launches: int = -1) -> BrokerSpec:
    return BrokerSpec(
        cluster_id="c",
        controller_host="127.0.0.1",
        controller_port=1,
        log_dirs="logs",
        host="127.0.0.1",
        rack=None,
        executor_id="0",
        settings={},
        topic_defaults={},
        secret="s",
        launch=launch,
        replaces=replaces,
        earlier_launches=earlier_launches,
    )


@pytest.mark.parametrize(
    ("launch", "over"), [(0, True), (4, True), (5, False), (6, True), (7, False), (9, False), (10, False)]
)
def test_launches_of_an_earlier_driver_and_the_replaced_one_are_over_and_no_others(launch: int, over: bool) -> None:
    assert spec(replaces=(6,), earlier_launches=4).supersedes(launch) is over


def test_the_first_launch_of_a_cluster_takes_over_from_nobody() -> None:
    assert not any(spec(launch=0).supersedes(launch) for launch in range(3))
