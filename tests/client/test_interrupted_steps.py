"""A signal after each step of a client's call: the client goes on, and nothing is lost, handed out twice or passed."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FrameType

import pyarrow as pa
import pytest

import spark_broker
from spark_broker import Admin, ConsumedBatch, ConsumedRecord, Consumer, Producer, TopicPartition
from tests.client.fake_broker import FakeCluster
from tests.support.alarms import Stop, alarms_stop
from tests.support.committed import committed_offset

OURS = str(Path(spark_broker.__file__).parent)
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
SOON_S = 5
"""A call that waits for what an interrupted one has left behind takes longer: the shortest time-out is ten seconds."""

Values = Callable[..., pa.RecordBatch]


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Where the signal comes while a generator is thrown away, Python itself throws away what its handler raises."""


@pytest.fixture(autouse=True)
def _alarms() -> Iterator[None]:
    with alarms_stop():
        yield


class Steps:
    """Counts where Python handles signals in this thread: when a function begins, and after a call of a function that
    is written in C. At one of these places, a signal comes.
    """

    def __init__(self, at: int) -> None:
        self.left = at

    @property
    def came(self) -> bool:
        return self.left <= 0

    def watch(self, frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith((OURS, threading.__file__)):
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGALRM)


@contextmanager
def signal_at(step: int) -> Iterator[Steps]:
    """What is in the block may be ended by Stop; the block is left without it."""
    steps, before = Steps(step), sys.getprofile()
    with suppress(Stop):
        sys.setprofile(steps.watch)
        try:
            yield steps
        finally:
            sys.setprofile(before)


def test_a_poll_that_is_interrupted_anywhere_passes_nothing(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t", 2)
    seen: dict[int, list[object]] = {0: [], 1: []}

    def take(batches: list[ConsumedBatch]) -> None:
        for batch in batches:
            seen[batch.partition] += batch.data["value"].to_pylist()

    with Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="earliest") as consumer:
        for step in count(1):
            cluster.store("t", step % 2, values(f"{step}"))
            batches: list[ConsumedBatch] = []
            with signal_at(step) as steps:
                batches = consumer.poll(SOON_S)
            take(batches)
            while len(seen[0]) + len(seen[1]) < step:
                batches = consumer.poll(SOON_S)
                assert batches, "nothing more comes"
                take(batches)
            if not steps.came:
                break
    assert step > 50
    assert list(seen.values()) == [[row["value"] for row in cluster.rows("t", number)] for number in seen]


def test_an_iteration_that_is_interrupted_anywhere_passes_nothing(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    seen: list[object] = []
    with Consumer(cluster.bootstrap, group_id="g", topics=["t"], auto_offset_reset="earliest") as consumer:
        records = iter(consumer)
        for step in count(1):
            cluster.store("t", 0, values(f"{step}"))
            came: list[ConsumedRecord] = []
            with signal_at(step) as steps:
                came.append(next(records))
            if not came:
                records = iter(consumer)  # The other one has ended.
                came.append(next(records))
            seen += [record.value for record in came]
            if not steps.came:
                break
    assert step > 50
    assert seen == [row["value"] for row in cluster.rows("t", 0)]


CALLS: dict[str, Callable[[Consumer], object]] = {
    "commit": lambda consumer: consumer.commit(),
    "commit_async": lambda consumer: consumer.commit_async(),
    "seek": lambda consumer: consumer.seek(T0, consumer.position(T0)),
    "assign": lambda consumer: consumer.assign([T0, T1]),
    "committed": lambda consumer: consumer.committed(T0),
    "end_offsets": lambda consumer: consumer.end_offsets([T0]),
}
OFTEN = ("commit", "seek")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.full) for name in CALLS]
)
def test_a_consumer_whose_call_is_interrupted_anywhere_goes_on(cluster: FakeCluster, values: Values, name: str) -> None:
    """Story: a commit that Ctrl-C had come into was never sent, and every later one waited for it until its time-out;
    or no metadata was ever asked for again.
    """
    cluster.create("t", 2)
    with Consumer(
        cluster.bootstrap,
        group_id="g",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        default_api_timeout_ms=SOON_S * 1000,
    ) as consumer:
        consumer.assign([T0, T1])
        for step in count(1):
            cluster.store("t", 0, values(f"{step}"))
            batches = consumer.poll(SOON_S)
            assert [batch.data["value"].to_pylist() for batch in batches] == [[f"{step}".encode()]]
            with signal_at(step) as steps:
                CALLS[name](consumer)
            consumer.commit()
            assert committed_offset(consumer, T0) == step
            if not steps.came:
                break
    assert step > 20


@pytest.mark.slow
@pytest.mark.parametrize("member", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_consumer_whose_close_is_interrupted_is_closed_by_the_next(
    cluster: FakeCluster, values: Values, member: bool
) -> None:
    """What was handed out is committed, or is read again; nobody waits for ever."""
    cluster.create("t")
    for step in count(1, 7):
        cluster.store("t", 0, values(f"{step}"))
        consumer = Consumer(cluster.bootstrap, group_id=f"g{step}", auto_offset_reset="earliest")
        if member:
            consumer.subscribe(["t"])
        else:
            consumer.assign([T0])
        while not consumer.poll(SOON_S):
            pass
        with signal_at(step) as steps:
            consumer.close(SOON_S)
        consumer.close(SOON_S)
        if not steps.came:
            break
    assert step > 20


@pytest.mark.parametrize("commits", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_transaction_that_is_interrupted_anywhere_can_be_ended_and_the_next_one_begun(
    cluster: FakeCluster, commits: bool
) -> None:
    """Story: the producer stayed "about to commit its transaction", and could neither commit nor abort it."""
    cluster.create("t")
    with Producer(cluster.bootstrap, transactional_id="x", max_block_ms=SOON_S * 1000) as producer:
        for step in count(1, 3):
            with signal_at(step) as steps, producer.transaction():
                producer.append("t", [{"value": b"maybe-%d" % step}])
                if not commits:
                    raise Stop
            if producer._transactions is not None and producer._transactions.is_open:
                producer.abort_transaction()
            with producer.transaction():
                producer.append("t", [{"value": b"sure-%d" % step}])
            if not steps.came:
                break
    assert step > 100
    with Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="earliest") as consumer:
        wanted = {b"sure-%d" % number for number in range(1, step + 1, 3)}
        came: list[object] = []
        while not wanted <= set(came):
            batches = consumer.poll(SOON_S)
            assert batches, "not everything that was committed is there"
            came += [value for batch in batches for value in batch.data["value"].to_pylist()]
    assert len(came) == len(set(came))


def test_a_producer_that_is_interrupted_while_it_looks_for_a_topic_goes_on(cluster: FakeCluster) -> None:
    """Story: every later request for metadata waited for one that nobody made any more."""
    cluster.create("t")
    for step in count(1, 17):
        with Producer(cluster.bootstrap, max_block_ms=SOON_S * 1000) as producer:
            with signal_at(step) as steps:
                producer.send("t", b"maybe")
            producer.send("t", b"sure").result(SOON_S)
        if not steps.came:
            break
    assert step > 100


@pytest.mark.full
def test_an_administrator_that_is_interrupted_goes_on(cluster: FakeCluster) -> None:
    cluster.create("t")
    for first in (False, True):
        admin = Admin(cluster.bootstrap, default_api_timeout_ms=SOON_S * 1000)
        try:
            for step in count(1, 1 if first else 5):
                if first:
                    admin.close()
                    admin = Admin(cluster.bootstrap, default_api_timeout_ms=SOON_S * 1000)
                with signal_at(step) as steps:
                    admin.describe_topic("t")
                assert len(admin.describe_topic("t").partitions) == 1
                if not steps.came:
                    break
        finally:
            admin.close()
        assert step > 50
