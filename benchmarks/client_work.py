"""One piece of work of our clients, in a process of its own: `python -m benchmarks.client_work SERVERS WORK TOPIC COUNT
REPLICAS` prints one JSON document. `benchmarks/kafka/Clients.java` does the same with Kafka's clients.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.cli.measure import measure_consume, measure_produce, random_records
from spark_broker.errors import InvalidRequestError, TopicAlreadyExistsError

PARTITIONS = 3
PRODUCERS = 16
VALUE = bytes(100)
BATCH_ROWS = 10_000

Figures = dict[str, float]


def main(given: list[str]) -> int:
    """Make the topic if it is not there, do the work, print its figures. Raises InvalidRequestError."""
    servers, work, topic, count, replicas = given
    create(servers, topic, int(replicas))
    works = {"append": append, "producers": producers, "send": send, "batches": batches, "consume": consume}
    if work not in works:
        raise InvalidRequestError(f"there is no work {work!r}", hint=f"Give one of {', '.join(works)}.")
    print(json.dumps(works[work](servers, topic, int(count))))
    return 0


def create(servers: str, topic: str, replicas: int) -> None:
    """A topic of three partitions."""
    config = {"min.insync.replicas": 2 if replicas > 1 else 1}
    with Admin(servers) as admin:
        try:
            admin.create_topic(NewTopic(topic, PARTITIONS, replicas, config=config))
        except TopicAlreadyExistsError:
            return


def append(servers: str, topic: str, count: int) -> Figures:
    """One record after the other, each awaited."""
    took: list[float] = []
    batch = random_records(1, len(VALUE))
    with Producer(servers, acks="all") as producer:
        for number in range(-count, count):
            began = time.perf_counter()
            producer.append(topic, batch).result()
            if number >= 0:
                took.append((time.perf_counter() - began) * 1000)
    took.sort()
    return {"p50_ms": statistics.median(took), "p99_ms": took[count * 99 // 100]}


def producers(servers: str, topic: str, count: int) -> Figures:
    """Many producers at once, each of which awaits each of its records."""
    barrier, each = threading.Barrier(PRODUCERS + 1), count // PRODUCERS
    failed: list[BaseException] = []

    def work() -> None:
        batch = random_records(1, len(VALUE))
        try:
            with Producer(servers, acks="all") as producer:
                for _ in range(each // 2):
                    producer.append(topic, batch).result()
                barrier.wait()
                for _ in range(each):
                    producer.append(topic, batch).result()
        except BaseException as error:
            failed.append(error)
            barrier.abort()
            raise

    threads = [threading.Thread(target=work) for _ in range(PRODUCERS)]
    for thread in threads:
        thread.start()
    barrier.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return {"records_per_s": PRODUCERS * each / (time.perf_counter() - began)}


def send(servers: str, topic: str, count: int) -> Figures:
    """One thread sends records one by one, until the last is acknowledged."""
    with Producer(servers, acks="all") as producer:
        for _ in range(count // 2):
            producer.send(topic, VALUE)
        producer.flush()
        began = time.perf_counter()
        futures = [producer.send(topic, VALUE) for _ in range(count)]
        producer.flush()
        seconds = time.perf_counter() - began
        for future in futures:
            future.result()
    return {"records_per_s": count / seconds}


def batches(servers: str, topic: str, count: int) -> Figures:
    """The same records in Arrow batches, as a micro-batch API gets them."""
    with Producer(servers, acks="all") as producer:
        batch = random_records(BATCH_ROWS, len(VALUE))
        return {"records_per_s": measure_produce(producer, topic, count, batch, warmup=count // 2).records_per_s}


def consume(servers: str, topic: str, count: int) -> Figures:
    """The first records of the topic, read twice: the first time warms up."""
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    rates = []
    for _ in range(2):
        with Consumer(servers) as consumer:
            rates.append(measure_consume(consumer, partitions, count).records_per_s)
    return {"records_per_s": rates[-1]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
