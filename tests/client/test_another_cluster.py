"""Another cluster answers at the addresses of a client: it was made anew, or has got a port of a broker that died."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pyarrow as pa
import pytest

from spark_broker import Admin, Consumer, Producer
from spark_broker.errors import InconsistentClusterIdError, SparkBrokerError
from spark_broker.model import RecordMetadata
from tests.client.fake_broker import FakeCluster
from tests.conftest import WaitUntil

WAIT_S = 30.0


def made_anew(cluster: FakeCluster) -> None:
    """Whose first producer has the id of the old cluster's first."""
    cluster.make_anew()
    cluster.create("t")
    with Producer(cluster.bootstrap) as other:
        for _ in range(3):
            other.append("t", [{"value": b"other"}]).result(WAIT_S)


def test_what_a_producer_appends_under_the_id_of_another_clusters_is_not_acknowledged(cluster: FakeCluster) -> None:
    """Story: the cluster was made anew, and another producer got the same id. Its sequence numbers were taken for
    this producer's: records were acknowledged and stored nowhere.
    """
    cluster.create("t")
    with Producer(cluster.bootstrap, request_timeout_ms=500, delivery_timeout_ms=1000) as producer:
        producer.append("t", [{"value": b"first"}]).result(WAIT_S)
        made_anew(cluster)
        futures: list[Future[list[RecordMetadata]]] = []
        for _ in range(3):
            futures.append(producer.append("t", [{"value": b"mine"}]))
            assert isinstance(futures[-1].exception(WAIT_S), SparkBrokerError)
        cluster.create("u")
        error = producer.append("u", [{"value": b"mine"}]).exception(WAIT_S)
        assert isinstance(error, InconsistentClusterIdError)
    assert [row["value"] for row in cluster.rows("t", 0)] == [b"other"] * 3
    assert cluster.rows("u", 0) == []


def test_an_administrator_and_a_consumer_are_told(
    cluster: FakeCluster, values: Callable[..., pa.RecordBatch], wait_until: WaitUntil
) -> None:
    cluster.create("t")
    with (
        Admin(cluster.bootstrap) as admin,
        Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="earliest", metadata_max_age_ms=100) as consumer,
    ):
        cluster.store("t", 0, values("first"))
        assert admin.list_topics() == ["t"]
        assert sum(batch.data.num_rows for batch in consumer.poll(WAIT_S)) == 1
        made_anew(cluster)
        with pytest.raises(InconsistentClusterIdError):
            admin.list_topics()

        def told() -> bool:
            try:
                assert consumer.poll(0.1) == [], "records of another cluster"
            except InconsistentClusterIdError:
                return True
            return False

        wait_until(told, "the consumer is told")
