"""The thread that opens and deletes replicas' files: see `file_jobs`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.threads import Worker


class FileWorker(Worker):
    """Works whenever it is told that there is something to do, until `stop`."""

    def __init__(self, on_bug: Callable[[BaseException], None]) -> None:
        super().__init__("replica-files", on_bug)
        self._due = threading.Event()
        self._stopped = False
        self.manager: ReplicaManager  # set once, before the thread starts

    def begin(self) -> None:
        """There is something to do. From any thread, also under locks."""
        self._due.set()

    def stop(self) -> None:
        """Work on what was begun ends; no other begins."""
        self._stopped = True
        self._due.set()

    def work(self) -> None:
        while not self._stopped:
            self._due.wait()
            self._due.clear()
            self._work_off()

    def _work_off(self) -> None:
        while self.manager.work():
            if self._stopped:
                return
