"""A host of brokers without Spark: its brokers run, and do nothing."""

from __future__ import annotations

import threading

from spark_broker.broker.spec import LOST, BrokerOutcome, BrokerSpec
from spark_broker.driver.executors import Executor
from spark_broker.driver.hosts import HostListener

WAIT_S = 20.0
HOST = "127.0.0.1"
EXECUTOR = Executor("1", HOST, 2)


def spec(launch: int) -> BrokerSpec:
    """What a broker on the executor is told."""
    return BrokerSpec(
        cluster_id="c",
        controller_host=HOST,
        controller_port=1,
        launch=launch,
        log_dirs="/logs",
        host=HOST,
        rack=None,
        executor_id=EXECUTOR.id,
        settings={},
        topic_defaults={},
        secret="secret",
    )


class RunningHost:
    """Its brokers run until it is closed."""

    shared_executor = True
    trouble = ""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def open(self, listener: HostListener) -> None: ...

    def executors(self) -> list[Executor]:
        return [EXECUTOR]

    def run(self, executor: Executor, launch: BrokerSpec) -> BrokerOutcome:
        del executor, launch
        self._closed.wait(WAIT_S)
        return BrokerOutcome(reason=LOST)

    def close(self) -> None:
        self._closed.set()
