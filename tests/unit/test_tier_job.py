"""`jobs/tier.py` without Spark: one topic that fails holds up no other."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import jobs.tier
from spark_broker.errors import HistoryNotFoundError


def test_a_topic_that_fails_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Story: the topics that were named after it were never tiered, and nothing was said of them."""

    def tier_topic(_spark: object, topic: str, _servers: str, **_: object) -> SimpleNamespace:
        if topic == "bad":
            raise HistoryNotFoundError("the table of bad is gone")
        return SimpleNamespace(topic=topic, path="/lake", log_starts=[], table_version=None)

    monkeypatch.setattr(jobs.tier, "session", lambda *_: nullcontext())
    monkeypatch.setattr(jobs.tier, "tier_topic", tier_topic)
    given = ["--bootstrap-servers", "localhost:1"]
    assert jobs.tier.main([*given, "--topic", "bad", "--topic", "good"]) == 1
    said = capsys.readouterr()
    assert "good: nothing is sealed" in said.out
    assert "the table of bad is gone" in said.err
    assert jobs.tier.main([*given, "--topic", "good"]) == 0
