"""`python -m spark_broker.driver.broker_child`: one broker of a nest, in a process of its own.

Reads its order as one line of JSON from standard input and writes its outcome as one line to standard output.
"""

from __future__ import annotations

import logging
import os
import sys

import msgspec

from spark_broker.driver.broker_task import log_to_stderr, serve
from spark_broker.driver.nest_task import ChildOrder

CHILD_GENERATIONS = 3
"""It watches the nest, `pyspark.daemon` and the JVM."""


def main() -> None:
    """Run the broker; does not return."""
    # What libraries print must not get between the nest and the outcome.
    outcome_fd = os.dup(1)
    os.dup2(2, 1)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildOrder)
    log_to_stderr(logging.WARNING)  # the user's own terminal or notebook
    if os.getppid() != order.parent_pid:
        os._exit(1)  # the nest ended before this process could watch it
    outcome = serve(order.spec, order.entry, CHILD_GENERATIONS)
    os.write(outcome_fd, outcome.to_json() + b"\n")
    os._exit(0)  # the broker's servers are never joined: an ordinary exit would wait for them


if __name__ == "__main__":
    main()
