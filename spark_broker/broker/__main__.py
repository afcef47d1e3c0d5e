"""`python -m spark_broker.broker <listener> <keeper>`: the process of one broker.

`broker.hosting.start` starts it. The process inherits two sockets: the listener through which keepers find it, and the
connection of its first keeper. It reads its order from standard input. Modules that may start threads are imported only
once it listens.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import cast

import msgspec

from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.custody import Custody, CustodyThread, LeaveRequest
from spark_broker.broker.hosting import BrokerOrder
from spark_broker.broker.log_format import formatter
from spark_broker.broker.repeats import Repeats
from spark_broker.broker.spec import FAILED, BrokerOutcome, BrokerSpec
from spark_broker.config import ClusterConfig
from spark_broker.errors import InvalidRequestError, KafkaStorageError, SparkBrokerError, UnknownServerError
from spark_broker.process_limits import limit_reached
from spark_broker.storage.descriptors import DESCRIPTORS
from spark_broker.storage.files import raise_file_size_limit
from spark_broker.storage.filesystem import PRIVATE_UMASK

logger = logging.getLogger(__name__)

Entry = Callable[[BrokerSpec, LeaveRequest], str]
"""Runs the broker until it has stopped, and returns the reason. When asked to leave, it does a controlled shutdown."""


def main() -> None:
    """Run the broker; does not return."""
    listener, keeper = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    listener.listen()  # in this process: keepers see the pid of the process that called listen()
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        sys.stderr.write(f"process {os.getpid()} was to be a broker: its starter ended before it had said which one\n")
        sys.stderr.flush()
        os._exit(1)
    order = msgspec.json.decode(line, type=BrokerOrder)
    settings = ClusterConfig.parse(order.spec.settings)
    log_to_stderr(settings.broker_log_level(shares_terminal=False), settings.log_format)
    DESCRIPTORS.raise_limit()
    raise_file_size_limit()
    os.umask(PRIVATE_UMASK)
    custody = Custody(
        SYSTEM_CLOCK.boottime_ms(),
        adoption_timeout_ms=settings.broker_adoption_timeout_ms,
        shutdown_timeout_ms=settings.controlled_shutdown_timeout_ms,
    )
    thread = CustodyThread(listener, keeper, order.executor, custody)
    thread.start()
    thread.report(serve(order.spec, order.entry, thread.leave))
    logging.shutdown()
    os._exit(0)  # the broker's servers are never joined: an ordinary exit would wait for them


def serve(spec: BrokerSpec, entry: str, leave: LeaveRequest) -> BrokerOutcome:
    """Run the broker until it ends; its typed errors become the outcome."""
    try:
        return BrokerOutcome(reason=load_entry(entry)(spec, leave))
    except SparkBrokerError as error:
        return _failed(error)
    except OSError as error:
        return _failed(limit_reached(error) or KafkaStorageError(str(error)))
    except Exception as error:
        limit = limit_reached(error)
        if limit is not None:
            return _failed(limit)
        # A bug of our own. If it were raised, the reason would be lost with the process.
        logger.exception("the broker ended on an unexpected error")
        return _failed(UnknownServerError(f"{type(error).__name__}: {error}"))


def _failed(error: SparkBrokerError) -> BrokerOutcome:
    logger.error("the broker failed: %s", error)
    return BrokerOutcome(reason=FAILED, error_code=error.code, error_message=error.message)


def load_entry(entry: str) -> Entry:
    """The function that `module:function` names."""
    module, _, name = entry.partition(":")
    if not name:
        raise InvalidRequestError(f"{entry!r} is not module:function")
    return cast("Entry", getattr(importlib.import_module(module), name))


def log_to_stderr(level: str, log_format: str) -> None:
    """Write the broker's log to stderr, which is the executor's."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Repeats())
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(level=level, handlers=[handler])


if __name__ == "__main__":
    main()
