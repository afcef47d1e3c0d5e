"""The clients of a soak, in a process of their own: `python -m tests.soak.clients <bootstrap> <seconds>`.

Clients, topics, transactions and groups come and go. One producer and one consumer stay for the whole time. Prints one
line of JSON at the end: how often each thing was done, and how often it failed with each error.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

from spark_broker import Admin, Consumer, NewTopic, Producer
from spark_broker.errors import SparkBrokerError
from tests.soak import census

STEADY = "steady"
PASSING = "passing"
PARTITIONS = 6
SMALL = {"min.insync.replicas": 2, "retention.bytes": 2_000_000, "segment.bytes": 500_000}
"""Keeps as much after five minutes as after an hour: otherwise clients that read all of it would seem to grow."""

IDS = 20
"""Transactional ids and groups are used again: the cluster remembers each of them for days."""

PAUSE_S = 0.02


class Clients:
    """Threads that work until a deadline."""

    def __init__(self, bootstrap: str, seconds: float) -> None:
        self.counts: Counter[str] = Counter()
        self._bootstrap = bootstrap
        self._until = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._pause = threading.Event()

    def run(self) -> None:
        """Make the topics, and work."""
        with Admin(self._bootstrap) as admin:
            for name in (STEADY, PASSING):
                admin.create_topic(NewTopic(name, PARTITIONS, 3, config=SMALL))
        work = (self._produce, self._consume, self._pass, self._pass, self._transact, self._group, self._topic)
        threads = [threading.Thread(target=self._repeat, args=(task, number)) for number, task in enumerate(work)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _repeat(self, work: Callable[[random.Random], None], number: int) -> None:
        """What fails while a broker is away is counted, and tried again."""
        rng, name = random.Random(number), work.__name__.strip("_")
        while self._going():
            try:
                work(rng)
            except SparkBrokerError as error:
                self._count(f"{name}: {error.name}")
                self._pause.wait(1.0)
            else:
                self._count(name)

    def _going(self) -> bool:
        return time.monotonic() < self._until

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _produce(self, rng: random.Random) -> None:
        with Producer(self._bootstrap, acks="all", linger_ms=5) as producer:
            while self._going():
                producer.send(STEADY, rng.randbytes(200), key=rng.randbytes(8))
                self._pause.wait(PAUSE_S)
            producer.flush()

    def _consume(self, rng: random.Random) -> None:
        with Consumer(self._bootstrap, topics=[STEADY], group_id="steady", auto_offset_reset="latest") as consumer:
            while self._going():
                consumer.poll(1.0)

    def _pass(self, rng: random.Random) -> None:
        if rng.random() < 0.5:
            with Producer(self._bootstrap, acks=rng.choice(["0", "1", "all"])) as producer:
                for _ in range(rng.randrange(20)):
                    producer.append(PASSING, [{"value": rng.randbytes(100)}]).result(60)
        else:
            with Consumer(self._bootstrap, topics=[PASSING], auto_offset_reset="earliest") as consumer:
                for _ in range(rng.randrange(5)):
                    consumer.poll(0.2)

    def _transact(self, rng: random.Random) -> None:
        with Producer(self._bootstrap, transactional_id=f"id-{rng.randrange(IDS)}") as producer:
            for _ in range(3):
                producer.begin_transaction()
                producer.append(PASSING, [{"value": rng.randbytes(100)}])
                if rng.random() < 0.3:
                    producer.abort_transaction()
                else:
                    producer.commit_transaction()

    def _group(self, rng: random.Random) -> None:
        group = f"group-{rng.randrange(IDS)}"
        with Consumer(self._bootstrap, topics=[PASSING], group_id=group, auto_offset_reset="earliest") as consumer:
            consumer.poll(0.5)
            consumer.commit()

    def _topic(self, rng: random.Random) -> None:
        name = f"topic-{rng.randrange(1_000_000)}"
        with Admin(self._bootstrap) as admin:
            admin.create_topic(NewTopic(name, rng.choice([1, 3, 6]), 3))
            with Producer(self._bootstrap) as producer:
                producer.append(name, [{"value": b"v"}]).result(60)
            admin.delete_topic(name)
        self._pause.wait(1.0)


def main() -> None:
    """Work for the given time."""
    census.begin()
    clients = Clients(sys.argv[1], float(sys.argv[2]))
    clients.run()
    json.dump(dict(sorted(clients.counts.items())), sys.stdout)


if __name__ == "__main__":
    main()
