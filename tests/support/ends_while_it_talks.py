"""A process that ends while its threads are inside streams: `python -m tests.support.ends_while_it_talks <port>`.

Half of the threads open, use and forget streams; the others wait in one for a message that never comes.
"""

from __future__ import annotations

import contextlib
import sys
import threading

from spark_broker.errors import NetworkError
from spark_broker.protocol.messages import FetchRequest
from spark_broker.transport.client import Connection

THREADS = 24
ROUNDS = 3
REQUEST = FetchRequest(1, max_wait_ms=0, min_bytes=0, max_bytes=1, partitions=[])


def main() -> None:
    port = int(sys.argv[1])
    busy = threading.Semaphore(0)

    def talk(kind: str) -> None:
        while True:
            with contextlib.suppress(NetworkError):
                connection = Connection("127.0.0.1", port)
                stream = connection.open_stream(kind)
                stream.send(REQUEST)
                if kind == "silent":
                    busy.release()
                stream.receive(timeout_ms=None)
                busy.release()

    for number in range(THREADS):
        kind = "echo" if number % 2 else "silent"
        threading.Thread(target=talk, args=(kind,), daemon=True).start()
    for _ in range(ROUNDS * THREADS):
        if not busy.acquire(timeout=30):
            sys.exit("the server did not answer")


if __name__ == "__main__":
    main()
