"""An ordinary producer and consumer that go on while a cluster is attacked, and what its processes cost meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil

from spark_broker import Consumer, Producer, TopicPartition
from tests.support.process_cluster import ProcessCluster

RESULT_TIMEOUT_S = 60


class Witness:
    """A context manager that appends numbered batches until it is left. Then it raises the error of an append."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._partition = TopicPartition(topic, 0)
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self.acknowledged = 0
        self._thread = threading.Thread(target=self._run, name="witness", daemon=True)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._stop.set()
        self._thread.join(RESULT_TIMEOUT_S)
        if self._failure is not None:
            raise AssertionError("an ordinary producer suffered from the attack") from self._failure

    def _run(self) -> None:
        try:
            with Producer(self._bootstrap_servers) as producer:
                while not self._stop.wait(0.02):
                    row = {"n": self.acknowledged, "s": "witness"}
                    producer.append(self._partition.topic, [row], partition=0).result(RESULT_TIMEOUT_S)
                    self.acknowledged += 1
        except BaseException as error:  # noqa: BLE001 - raised by `__exit__`
            self._failure = error

    def read_back(self) -> list[int]:
        """The numbers that a consumer finds, in order."""
        numbers: list[int] = []
        with Consumer(self._bootstrap_servers, auto_offset_reset="earliest") as consumer:
            consumer.assign([self._partition])
            end = consumer.end_offsets([self._partition])[self._partition]
            while consumer.position(self._partition) < end:
                for batch in consumer.poll(timeout=5.0):
                    numbers += [row["n"] for row in batch.data.to_pylist() if row["s"] == "witness"]
        return numbers


class Cost:
    """Memory, threads and descriptors of the brokers and the controller, against what they were at first."""

    def __init__(self, cluster: ProcessCluster, brokers: int) -> None:
        pids = {f"broker in slot {slot}": cluster.pid(slot) for slot in range(brokers)}
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._processes["controller"] = psutil.Process(cluster.controller.pid)
        self._threads = {name: process.num_threads() for name, process in self._processes.items()}
        self._descriptors = {name: process.num_fds() for name, process in self._processes.items()}
        self._resident = {name: process.memory_info().rss for name, process in self._processes.items()}

    def gone(self) -> list[str]:
        """Processes that have ended: an InvariantError, or anything that is not typed, ends a broker."""
        return [
            name
            for name, process in self._processes.items()
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        ]

    def more_threads(self) -> dict[str, int]:
        """By how many threads each process has grown."""
        return {name: process.num_threads() - self._threads[name] for name, process in self._processes.items()}

    def more_descriptors(self) -> dict[str, int]:
        """By how many open files and connections each process has grown."""
        return {name: process.num_fds() - self._descriptors[name] for name, process in self._processes.items()}

    def grown_mib(self) -> dict[str, int]:
        """By how much each process has grown."""
        now = {name: process.memory_info().rss for name, process in self._processes.items()}
        return {name: (now[name] - before) >> 20 for name, before in self._resident.items()}

    def peak_grown_mib(self) -> dict[str, int]:
        """By how much each process had grown when it was largest."""
        return {
            name: (_peak_bytes(process.pid) - self._resident[name]) >> 20 for name, process in self._processes.items()
        }


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
