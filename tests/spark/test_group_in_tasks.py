"""One consumer group over the tasks of a Spark job: each task is a member, in the worker's process of an executor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from spark_broker import Admin, NewTopic, Producer
from spark_broker.errors import GroupIdNotFoundError
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_broker.driver.cluster import BrokerCluster

TASKS, PARTITIONS, RECORDS = 3, 6, 600
TASK_S = 120.0
TOPIC = GROUP = "read-by-tasks"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_tasks_of_a_job_share_a_topic_and_read_every_record_once(spark: SparkSession, cluster: BrokerCluster) -> None:
    servers = cluster.bootstrap_servers

    def read(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What this task is handed, until the group has committed everything."""
        from pyspark import TaskContext

        from spark_broker import Consumer, TopicPartition

        context = TaskContext.get()
        assert context is not None
        every = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
        with Consumer(servers, group_id=GROUP, topics=[TOPIC], auto_offset_reset="earliest") as consumer:
            committed, until_s = 0, time.monotonic() + TASK_S
            while committed < RECORDS and time.monotonic() < until_s:
                for batch in consumer.poll(0.5):
                    rows = pa.array([context.partitionId()] * batch.data.num_rows, pa.int64())
                    yield pa.record_batch({"task": rows, "value": batch.data.column("value")})
                consumer.commit()
                stored = [consumer.committed(tp) for tp in every]
                committed = sum(offset.offset for offset in stored if offset is not None)

    def is_shared() -> bool:
        try:
            members = admin.describe_group(GROUP).members
        except GroupIdNotFoundError:
            return False
        return [len(member.assigned) for member in members] == [PARTITIONS // TASKS] * TASKS

    with Admin(servers) as admin, ThreadPoolExecutor(1) as job:
        admin.create_topic(NewTopic(TOPIC, PARTITIONS, 3))
        rows = spark.range(TASKS, numPartitions=TASKS).mapInArrow(read, "task long, value binary")
        running = job.submit(rows.collect)
        eventually(lambda: is_shared() or running.done(), 120, "every task to own a share")
        values = [b"%d" % number for number in range(RECORDS)]
        with Producer(servers) as producer:
            for number, value in enumerate(values):
                producer.send(TOPIC, value, partition=number % PARTITIONS)
        found = running.result(120)

    assert sorted(bytes(row.value) for row in found) == sorted(values)
    assert {row.task for row in found} == set(range(TASKS))
