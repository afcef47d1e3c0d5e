"""`jobs/cluster.py` while its cluster starts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from jobs import cluster as job
from spark_broker.config import load_cluster_settings
from spark_broker.errors import ClosedError

ROUNDS = 100


def test_a_signal_ends_a_start_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: Ctrl-C did nothing for two minutes while executors did not come."""
    stop, rounds = threading.Event(), 0

    class Waits:
        @staticmethod
        def start(*_: object, on_progress: Callable[[str, int, int], None], **__: object) -> None:
            nonlocal rounds
            for rounds in range(1, ROUNDS + 1):
                on_progress("executors", 0, 3)
                if rounds == 2:
                    stop.set()
            pytest.fail("it waits on")

    monkeypatch.setattr(job, "BrokerCluster", Waits)
    spark: Any = None
    options, settings = job.arguments([]), load_cluster_settings(None)
    with pytest.raises(ClosedError, match="a signal came"), job.started(spark, options, settings, stop):
        pytest.fail("it has started")
    assert rounds == 3


def test_a_master_that_does_not_answer_is_told_in_a_line() -> None:
    """Story: Spark's exception said where the session was made, frame by frame. Its log had said why it gave up."""
    made = "This stopped SparkContext was created at:\n\na.b.C(C.java:1)"
    assert (
        job.why(Exception(f"Cannot call methods on a stopped SparkContext.\n{made}"))
        == "Cannot call methods on a stopped SparkContext. The reason is above."
    )
