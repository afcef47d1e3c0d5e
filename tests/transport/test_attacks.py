"""After each attack on the carrier, a server holds no byte, no thread and no descriptor more than before it."""

from __future__ import annotations

import random
from contextlib import closing

import pytest

from spark_broker.transport import channel
from tests.fuzz.raw_attacks import ATTACKS, SlowLoris, Target
from tests.transport.rig import HOST, Settings, rig

KINDS = ("echo", "held", "replica")
SETTINGS = Settings(max_request_bytes=8_000_000)


@pytest.mark.timeout(120)
@pytest.mark.full  # `tests/fuzz/test_live_broker.py` tries each attack on processes.
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_nothing_is_left_of_an_attack(monkeypatch: pytest.MonkeyPatch, attack: str, seed: int) -> None:
    monkeypatch.setattr(channel, "FINISH_TIMEOUT_S", 0.5)
    with rig(monkeypatch, SETTINGS) as served:
        served.go_on.open()
        ATTACKS[attack](Target(HOST, served.server.port, KINDS), random.Random(f"{attack}/{seed}"))
        served.serves()


def test_connections_that_speak_slowly_cost_what_they_have_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        rig(monkeypatch, SETTINGS) as served,
        closing(SlowLoris(Target(HOST, served.server.port, KINDS), 150)) as slow,
    ):
        for _ in range(20):
            slow.step()
            served.serves()
        served.await_used(0)  # A handler gives back what it has answered a moment after its answer.
        slow.begin_request()
        served.serves()
