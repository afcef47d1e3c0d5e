"""Brokers that are overloaded: clients wait and ask again. A client that gives up names the reason of each address."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from spark_broker import Admin, Consumer, Producer
from spark_broker.client.connections import ConnectionPool
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import Backoff, Deadline
from spark_broker.client.settings import Address, parse_addresses
from spark_broker.errors import (
    BootstrapUnreachableError,
    RequestTimedOutError,
    SparkBrokerError,
    ThrottlingQuotaExceededError,
)
from spark_broker.protocol.frame import BatchHeader
from spark_broker.protocol.messages import AppendRequest, CallRequest, Message, MetadataRequest
from tests.client.fake_broker import FakeCluster
from tests.client.proxy import Proxy
from tests.support.ports import refused_address

Values = Callable[..., pa.RecordBatch]
WAIT_S = 30.0

BUSY = ThrottlingQuotaExceededError("500 calls wait for their turn already")


def overload_calls(cluster: FakeCluster, times: int) -> list[float]:
    """Refuse the first `times` calls. Returns the times at which calls come."""
    came: list[float] = []

    def hook(broker: int, request: CallRequest) -> Message | None:
        came.append(time.monotonic())
        if len(came) <= times:
            raise BUSY
        return None

    cluster.call_hook = hook
    return came


def test_calls_that_were_throttled_are_made_again_after_a_wait(cluster: FakeCluster) -> None:
    cluster.create("t")
    came = overload_calls(cluster, 6)
    with Admin(cluster.bootstrap, retry_backoff_ms=200, retry_backoff_max_ms=200) as admin:
        assert admin.list_topics() == ["t"]
    rounds = 6 // len(cluster.brokers)
    assert came[6] - came[0] > rounds * 0.2 * 0.7, "it has not waited between the rounds"


def test_brokers_that_stay_overloaded_are_called_so(cluster: FakeCluster) -> None:
    overload_calls(cluster, 1_000_000)
    with (
        Admin(cluster.bootstrap, default_api_timeout_ms=3000) as admin,
        pytest.raises(ThrottlingQuotaExceededError, match="500 calls wait"),
    ):
        admin.list_topics()


def test_a_call_that_the_deadline_cuts_short_says_nothing_of_its_broker(cluster: FakeCluster) -> None:
    """All are overloaded. One is so slow at the end that its last answer comes too late."""
    answered: set[int] = set()
    given_up = threading.Event()

    def hook(broker: int, request: CallRequest) -> Message | None:
        if broker in answered:
            given_up.wait(WAIT_S)
        answered.add(broker)
        raise BUSY

    cluster.call_hook = hook
    try:
        with (
            Admin(cluster.bootstrap, default_api_timeout_ms=1500) as admin,
            pytest.raises(ThrottlingQuotaExceededError, match="500 calls wait"),
        ):
            admin.list_topics()
    finally:
        given_up.set()


def test_an_overloaded_broker_does_not_keep_a_client_from_the_others(cluster: FakeCluster) -> None:
    cluster.create("t")

    def hook(broker: int, request: CallRequest) -> Message | None:
        if broker == 0 and isinstance(request, MetadataRequest):
            raise BUSY
        return None

    cluster.call_hook = hook
    for _ in range(10):
        with Admin(cluster.bootstrap) as admin:
            assert admin.list_topics() == ["t"]


def test_appends_that_were_throttled_are_stored_once_in_order(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    refusals = iter([True] * 4)

    def hook(broker: int, request: AppendRequest, header: BatchHeader) -> SparkBrokerError | None:
        return BUSY if next(refusals, False) else None

    cluster.append_hook = hook
    with Producer(cluster.bootstrap) as producer:
        futures = [producer.append("t", values(f"{n}"), partition=0) for n in range(10)]
        for future in futures:
            future.result(WAIT_S)
        assert producer.metrics()["retries"] > 0
    with Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="earliest") as consumer:
        consumed: list[bytes] = []
        while len(consumed) < 10:
            consumed += [value for batch in consumer.poll(WAIT_S) for value in batch.data.column("value").to_pylist()]
    assert consumed == [f"{n}".encode() for n in range(10)]


def test_addresses_at_which_nobody_is_are_told_from_each_other() -> None:
    refused = refused_address()
    with (
        Admin(f"{refused},no-such-host.invalid:9092", default_api_timeout_ms=120_000) as admin,
        pytest.raises(BootstrapUnreachableError) as caught,
    ):
        admin.list_topics()
    assert f"{refused} refuses connections: no process listens there" in caught.value.message
    assert "no-such-host.invalid:9092 its name cannot be resolved" in caught.value.message


@pytest.mark.slow
def test_a_broker_that_takes_connections_and_does_not_answer_is_not_called_unreachable(cluster: FakeCluster) -> None:
    refused, silent = refused_address(), Proxy(cluster.brokers[0].port)
    silent.freeze()
    try:
        with (
            Admin(f"{refused},127.0.0.1:{silent.port}", default_api_timeout_ms=4000) as admin,
            pytest.raises(RequestTimedOutError) as caught,
        ):
            admin.list_topics()
    finally:
        silent.kill()
    assert f"127.0.0.1:{silent.port} takes connections, but has not answered" in caught.value.message
    assert "overloaded or frozen" in caught.value.message
    assert f"{refused} refuses connections" in caught.value.message


def test_whoever_gives_up_says_what_earlier_rounds_heard_of_an_address(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last round has time for the first address only."""
    refused, silent = parse_addresses([refused_address()])[0], Proxy(cluster.brokers[0].port)
    silent.freeze()
    rounds = iter([[refused, Address("127.0.0.1", silent.port)]])
    later = [Address("127.0.0.1", silent.port), refused]
    monkeypatch.setattr(ClusterMetadata, "_candidates", lambda _: next(rounds, later))
    metadata = ClusterMetadata(
        (refused,), ConnectionPool(), Backoff(10, 10), request_timeout_ms=30_000, max_age_ms=300_000
    )
    try:
        with pytest.raises(RequestTimedOutError) as caught:
            metadata.refresh(Deadline.after_ms(2000))
    finally:
        metadata.close()
        silent.kill()
    assert f"127.0.0.1:{silent.port} takes connections, but has not answered" in caught.value.message
    assert f"{refused} refuses connections" in caught.value.message


def wake_ups(thread: threading.Thread) -> int:
    """How often a thread has gone to sleep so far."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text(encoding="ascii")
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts a thread's wake-ups in /proc")
def test_a_producer_that_does_nothing_is_not_woken(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap, client_id="idle") as producer:
        producer.append("t", values("a")).result(WAIT_S)
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("idle-")]
        assert "idle-deadlines" in {thread.name for thread in threads}
        threading.Event().wait(1.0)  # what the append has begun comes to its end
        before = {thread.name: wake_ups(thread) for thread in threads}
        threading.Event().wait(1.5)
        assert {name: wake_ups(thread) - before[name] for thread in threads if (name := thread.name)} == dict.fromkeys(
            before, 0
        )
