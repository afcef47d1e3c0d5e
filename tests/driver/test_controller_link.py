"""When the driver starts its controller again."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn, cast

import pytest

from spark_broker.config import ClusterConfig, load_cluster_settings
from spark_broker.driver import controller_link
from spark_broker.driver.controller_client import ControllerClient
from spark_broker.driver.controller_link import LASTED_S, RESTART_PAUSE_MAX_S, WATCH_INTERVAL_S, ControllerLink
from spark_broker.driver.controller_pipe import ControllerConfig
from spark_broker.driver.directories import choose_directories
from spark_broker.errors import ClusterStartError, SparkBrokerError


class Ended:
    """A controller that has ended, without a word. `alive` is set where one that was started runs."""

    host, port, pid, cluster_id, end = "127.0.0.1", 1, 1, "c", "status 1, without a word"
    brokers: tuple[()] = ()
    failure: SparkBrokerError | None = None
    alive = False

    def status(self) -> Ended:
        return self


class Pauses:
    """In the place of the event that ends the watch. `now_s`: passes only here."""

    def __init__(self, client: Ended, lasts_s: float) -> None:
        self.client, self._lasts_s = client, lasts_s
        self.pauses: list[float] = []
        self.now_s = 0.0

    def wait(self, pause_s: float) -> bool:
        self.pauses.append(pause_s)
        self.now_s += pause_s
        if len(self.pauses) == 8:
            self.client.alive = True
        if self.client.alive and self.now_s >= self._lasts_s:
            self.client.alive = False
        return len(self.pauses) > 300

    def is_set(self) -> bool:
        return False

    def monotonic(self) -> float:
        return self.now_s


def test_a_controller_that_does_not_last_is_started_after_longer_and_longer_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, starts = Ended(), list[float]()
    link = ControllerLink(
        cast("ControllerClient", client), ControllerConfig(cluster={}, topic={}, metadata_dir=""), ClusterConfig()
    )
    clock = Pauses(client, lasts_s=4 * LASTED_S)

    def refuse(_: ControllerConfig) -> ControllerClient:
        starts.append(clock.now_s)
        raise ClusterStartError("no thread")

    monkeypatch.setattr(link, "_closed", clock)
    monkeypatch.setattr(controller_link, "time", clock)
    monkeypatch.setattr(ControllerClient, "start", refuse)
    link._keep()
    pauses = clock.pauses
    assert pauses[:7] == [min(WATCH_INTERVAL_S * 2**n, RESTART_PAUSE_MAX_S) for n in range(7)]
    assert starts[0] == WATCH_INTERVAL_S, "the first time at once"
    assert WATCH_INTERVAL_S in pauses[8:], "one that has lasted is looked at as often as before"


def test_a_start_that_is_interrupted_leaves_no_controller_and_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: Ctrl-C while the controller was asked for its brokers. The directories were in use by this very driver."""
    settings, asked = load_cluster_settings({"log.dirs": str(tmp_path / "logs")}), list[ControllerClient]()

    def start() -> ControllerLink:
        directories = choose_directories(settings.cluster, "app")
        return ControllerLink.start(settings, directories, host="127.0.0.1", shared_executor=True)

    def interrupted(client: ControllerClient) -> NoReturn:
        asked.append(client)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ControllerClient, "status", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start()
    assert [client.alive for client in asked] == [False]
    start().close()
