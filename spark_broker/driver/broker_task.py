"""What runs in a Spark task: one broker, for as long as it lives.

This module is imported in executors, so it imports nothing that starts threads: gRPC (`pyarrow.flight`) does not
survive a fork, and Spark's workers are forks of `pyspark.daemon`. The broker itself is imported by name, in the task.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from spark_broker.broker.spec import FAILED, MISPLACED, RETRIED, BrokerOutcome, BrokerSpec
from spark_broker.broker.watchdog import Watchdog, die_with_parent, lineage
from spark_broker.errors import InvalidRequestError, KafkaStorageError, SparkBrokerError, UnknownServerError

logger = logging.getLogger(__name__)

RUN_BROKER = "spark_broker.broker.process:run_broker"
"""The broker's entry: `run_broker(spec) -> reason`, returns when the broker has stopped."""

TASK_GENERATIONS = 2
"""A task's process watches `pyspark.daemon` and the executor's JVM."""

EXIT_DELAY_S = 0.5
"""How long a task's process outlives its broker, so that Spark has the task's result."""


@dataclass(frozen=True)
class ExecutorIdentity:
    """The executor that this process belongs to. `verified`: Spark's own id was found on the JVM's command line."""

    executor_id: str
    jvm_pid: int
    verified: bool


def _attempt_number() -> int:
    # Imported here: a broker outside a Spark task (local[N]) need not load pyspark.
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else context.attemptNumber()


def broker_task(entry: str) -> Callable[[Iterable[bytes]], Iterator[bytes]]:
    """The function of a broker's job. Its one row is the BrokerSpec; it returns one row, the BrokerOutcome."""
    return functools.partial(run_broker_task, entry=entry)


def run_broker_task(rows: Iterable[bytes], *, entry: str) -> Iterator[bytes]:
    """Run the broker that the row specifies, unless this is not the launch or the executor that was meant."""
    spec = BrokerSpec.from_json(bytes(next(iter(rows))))
    if _attempt_number() > 0:
        # Spark repeats a task whose executor it lost. The launch is over by then: its number may have been fenced.
        yield BrokerOutcome(reason=RETRIED, error_message="Spark lost its task and ran it again").to_json()
        return
    executor = executor_identity()
    if executor.verified and executor.executor_id != spec.executor_id:
        # A preferred location is a wish: when no core is free there within spark.locality.wait, Spark goes elsewhere.
        yield BrokerOutcome(reason=MISPLACED, error_message=f"on executor {executor.executor_id}").to_json()
        return
    log_to_stderr(logging.INFO)
    outcome = serve(spec.on_executor(executor.executor_id, executor.jvm_pid), entry, TASK_GENERATIONS)
    _exit_soon()
    yield outcome.to_json()


def serve(spec: BrokerSpec, entry: str, generations: int) -> BrokerOutcome:
    """Run the broker under a watchdog until it ends; its typed errors become the outcome."""
    die_with_parent()
    Watchdog(generations).start()
    try:
        return BrokerOutcome(reason=load_entry(entry)(spec))
    except SparkBrokerError as error:
        return _failed(error)
    except OSError as error:
        return _failed(KafkaStorageError(str(error)))
    except Exception as error:
        # A bug of our own. Raised on, Spark would run the task again and lose the reason.
        logger.exception("the broker ended on an unexpected error")
        return _failed(UnknownServerError(f"{type(error).__name__}: {error}"))


def _failed(error: SparkBrokerError) -> BrokerOutcome:
    logger.error("the broker failed: %s", error)
    return BrokerOutcome(reason=FAILED, error_code=error.code, error_message=error.message)


def load_entry(entry: str) -> Callable[[BrokerSpec], str]:
    """`module:function`, imported now, after the fork."""
    module, _, name = entry.partition(":")
    if not name:
        raise InvalidRequestError(f"{entry!r} is not module:function")
    return cast("Callable[[BrokerSpec], str]", getattr(importlib.import_module(module), name))


def executor_identity() -> ExecutorIdentity:
    """Which executor this worker belongs to: the parent of `pyspark.daemon` is its JVM; its command line has the id."""
    jvm_pid = lineage(TASK_GENERATIONS)[-1]
    try:
        command = (Path("/proc") / str(jvm_pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        command = []
    if b"--executor-id" in command[:-1]:
        return ExecutorIdentity(command[command.index(b"--executor-id") + 1].decode(), jvm_pid, verified=True)
    return ExecutorIdentity(f"pid-{jvm_pid}", jvm_pid, verified=False)


def log_to_stderr(level: int) -> None:
    """Executors keep their Python workers' stderr: that is where a broker's log is."""
    logging.basicConfig(
        level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
    )


def _exit_soon() -> None:
    """End this process once Spark has the result: a worker that has served must not go back to Spark's pool.

    A superseded broker exits, it does not merely stop serving; and its servers, which are never joined, would live on.
    """

    def leave() -> None:
        threading.Event().wait(EXIT_DELAY_S)
        os._exit(0)

    threading.Thread(target=leave, name="leave", daemon=True).start()
