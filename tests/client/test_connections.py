"""Clients are closed while they are used: their process goes on, and they leave nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.client.fake_broker import FakeCluster

PROCESS_TIMEOUT_S = 240.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "seconds", [pytest.param(4, marks=pytest.mark.quick), pytest.param(60, marks=pytest.mark.full)]
)
def test_clients_that_are_closed_while_they_are_used_leave_their_process_alive_and_nothing_behind(
    cluster: FakeCluster, seconds: int
) -> None:
    cluster.create("t", 3)

    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.support.client_churn", cluster.bootstrap, str(seconds)],
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT_S,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr[-5000:]
    told = json.loads(ran.stdout)
    assert told["errors"] == []
    assert told["clients"] > 20
    assert told["end"]["files"] <= told["middle"]["files"] + 5, told
    assert told["end"]["threads"] <= told["middle"]["threads"] + 2, told
