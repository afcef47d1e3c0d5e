"""`create_views`, without a session: which topics get a view, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from pyspark.errors import AnalysisException

from spark_broker.errors import BootstrapUnreachableError, InvalidDataError, SparkBrokerError
from spark_broker.spark import frames
from tests.client.fake_broker import FakeCluster


@dataclass
class FakeSession:
    """It notes the views. `broken`: what the read of a topic does, by its name."""

    cluster: FakeCluster
    views: list[str] = field(default_factory=list)
    broken: dict[str, Callable[[], Exception]] = field(default_factory=dict)
    readStream: None = None  # noqa: N815 - Spark's name

    @property
    def conf(self) -> dict[str, str]:
        return {}

    def read_topic(self, _spark: FakeSession, topic: str, **_options: str) -> FakeFrame:
        if topic in self.broken:
            raise self.broken[topic]()
        return FakeFrame(self)

    def create_views(self) -> list[str]:
        return frames.create_views(self, self.cluster.bootstrap)  # type: ignore[arg-type]


@dataclass
class FakeFrame:
    session: FakeSession

    def createOrReplaceTempView(self, name: str) -> None:
        self.session.views.append(name.strip("`"))


@pytest.fixture
def session(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    session = FakeSession(cluster)
    monkeypatch.setattr(frames, "read_topic", session.read_topic)
    for name in ("a", "b", "c", "d", "e"):
        cluster.create(name)
    return session


def test_one_topic_that_cannot_be_read_takes_no_other_view(session: FakeSession) -> None:
    """Story: the table of one topic was gone. Topics later in the list had no view, or the one of yesterday."""
    session.broken = {
        "b": lambda: InvalidDataError("the table is gone"),
        "d": lambda: AnalysisException("[PYTHON_DATA_SOURCE_ERROR] no rights\n\npages"),
    }
    with pytest.raises(InvalidDataError, match=r"of b, d\. b: .*the table is gone.*; d: .*no rights"):
        session.create_views()
    assert session.views == ["a", "c", "e"]


def test_a_topic_that_is_deleted_meanwhile_is_left_out(cluster: FakeCluster, session: FakeSession) -> None:
    def gone() -> Exception:
        del cluster.topics["b"]
        return AnalysisException("[UNKNOWN_TOPIC_OR_PARTITION] topic 'b' does not exist")

    session.broken = {"b": gone}
    assert session.create_views() == session.views == ["a", "c", "d", "e"]


def test_without_brokers_it_ends_at_once(
    cluster: FakeCluster, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = iter([["a", "b"]])

    def list_topics(_admin: object) -> list[str]:
        for names in listed:
            return names
        raise BootstrapUnreachableError("nobody is there")

    monkeypatch.setattr("spark_broker.client.admin.Admin.list_topics", list_topics)
    session.broken = {"a": lambda: SparkBrokerError("too late")}
    with pytest.raises(BootstrapUnreachableError):
        session.create_views()
    assert session.views == []
