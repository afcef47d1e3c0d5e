"""A process of many threads that open, use and close clients: `python -m tests.support.client_churn <bootstrap> <s>`.

Prints one line of JSON: how many clients there were, and the process's open files and threads in the middle and at the
end, with no client open.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import sys
import threading
import time
from pathlib import Path

from spark_broker import Consumer, Producer
from spark_broker.errors import ClosedError

THREADS = 20
SETTLE_S = 10.0


class Churn:
    """Threads that open, use and close clients until a deadline."""

    def __init__(self, bootstrap: str) -> None:
        self.clients = 0
        self._bootstrap = bootstrap
        self._lock = threading.Lock()

    def run(self, seconds: float) -> None:
        """Churn for this time."""
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=self._churn, args=(number, until)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _churn(self, number: int, until: float) -> None:
        rng = random.Random(number)
        while time.monotonic() < until:
            with contextlib.suppress(ClosedError):  # the other thread has closed it, as intended
                self._use_one(rng)
            with self._lock:
                self.clients += 1

    def _use_one(self, rng: random.Random) -> None:
        """A client that another thread closes while it is used, at any moment of its life."""
        client = self._consumer() if rng.random() < 0.7 else Producer(self._bootstrap, linger_ms=1)
        closer = threading.Timer(rng.random() * 0.2, client.close)
        closer.start()
        try:
            if isinstance(client, Consumer):
                for _ in range(3):
                    client.poll(0.1)
            else:
                for _ in range(3):
                    client.send("t", b"value").result(30)
        finally:
            closer.join()
            client.close()

    def _consumer(self) -> Consumer:
        return Consumer(self._bootstrap, topics=["t"], auto_offset_reset="earliest")


def open_now() -> dict[str, int]:
    """Open files and threads, once those of closed clients have had the time to go."""
    until, pause = time.monotonic() + SETTLE_S, threading.Event()
    before: dict[str, int] = {}
    now = counted()
    while now != before and time.monotonic() < until:
        pause.wait(1.0)
        before, now = now, counted()
    return now


def counted() -> dict[str, int]:
    gc.collect()
    return {"files": len(list(Path("/proc/self/fd").iterdir())), "threads": threading.active_count()}


def main() -> None:
    """Churn twice, and report."""
    errors: list[str] = []
    threading.excepthook = lambda hook: errors.append(f"{hook.exc_type.__name__}: {hook.exc_value}")
    churn = Churn(sys.argv[1])
    seconds = float(sys.argv[2])
    churn.run(seconds / 2)
    middle = open_now()
    churn.run(seconds / 2)
    json.dump({"clients": churn.clients, "errors": errors[:5], "middle": middle, "end": open_now()}, sys.stdout)


if __name__ == "__main__":
    main()
