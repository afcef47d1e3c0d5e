"""The driver's side of the controller's process: start it, report losses to it, ask it for launch numbers, end it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Self

from spark_broker import errors
from spark_broker.broker.log_format import log_fields
from spark_broker.driver.controller_pipe import (
    MAX_LINE_BYTES,
    Answer,
    Command,
    ControllerConfig,
    ControllerFailed,
    ControllerStatus,
    FromController,
    LogLine,
    Started,
    error_of,
    from_controller,
    to_line,
)
from spark_broker.errors import (
    ClosedError,
    ClusterStartError,
    InvalidRequestError,
    NotControllerError,
    ProcessLimitError,
    RequestTimedOutError,
    SparkBrokerError,
)
from spark_broker.process_limits import limit_reached
from spark_broker.threads import Worker, start
from spark_broker.transport.origin import Origin

logger = logging.getLogger(__name__)
controller_logger = logging.getLogger("spark_broker.controller")
"""The log of the controller's process, as a part of the driver's."""

START_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0


class ControllerClient:
    """A running controller process. Safe for use by many threads; every wait has a deadline.

    Raises NotControllerError from every call once the process has ended, and ClosedError after `close`.
    """

    def __init__(self, process: subprocess.Popen[bytes], config: ControllerConfig) -> None:
        self._process = process
        self._config = config
        self._changed = threading.Condition()
        self._started: Started | None = None
        self._answers: dict[int, Answer | None] = {}  # by command id; None while the answer is awaited
        self._failed: ControllerFailed | None = None
        self._next_id = 0
        self._ended = False
        self._closed = False
        self._origin = Origin()
        # Without its answers the controller is of no use. Where it is killed, another one is started.
        self._reader = Worker("controller-answers", lambda _: process.kill(), self._read)

    @classmethod
    def start(cls, config: ControllerConfig, *, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Start the process and wait until it serves.

        Raises the error that kept it from serving (InconsistentClusterIdError, MetadataStoreError, NoThreadError, ...)
        or ClusterStartError.
        """
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "spark_broker.driver.controller_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
                start_new_session=True,  # Ctrl-C in the terminal reaches only the driver, which then stops the cluster
            )
        except OSError as error:
            reason = limit_reached(error) or ClusterStartError(f"the controller's process cannot be started: {error}")
            raise reason from error
        client = cls(process, config)
        try:
            client._begin(timeout_s)
        except BaseException:
            client.close()
            raise
        return client

    def _begin(self, timeout_s: float) -> None:
        start(self._reader)
        self._write(to_line(self._config))
        with self._changed:
            self._changed.wait_for(lambda: self._started is not None or self._ended, timeout_s)
            started, failed = self._started, self._failed
        if started is None:
            if failed is not None and (error := error_of(failed)) is not None:
                raise error
            raise ClusterStartError(f"the controller's process did not serve within {timeout_s} s; see its stderr")
        if (error := error_of(started)) is not None:
            raise error

    @property
    def host(self) -> str:
        return self._config.host

    @property
    def port(self) -> int:
        return self._serving().port

    @property
    def cluster_id(self) -> str:
        return self._serving().cluster_id

    @property
    def controller_epoch(self) -> int:
        return self._serving().controller_epoch

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def failure(self) -> SparkBrokerError | None:
        """Why the ended process must not be started again: it was deposed, has no metadata store, or has told of a bug.

        None where a signal ended it, where it came to a limit of its process, and where it ended without a word:
        another process may do better.
        """
        error = self._last_words()
        return None if isinstance(error, ProcessLimitError) else error

    @property
    def end(self) -> str:
        """How the process ended, for people."""
        error, status = self._last_words(), self._process.poll() or 0
        if error is not None:
            return str(error)
        return f"signal {-status} ended it" if status < 0 else f"status {status}, without a word; see its stderr"

    def _last_words(self) -> SparkBrokerError | None:
        self._reader.join(CLOSE_TIMEOUT_S)
        with self._changed:
            return None if self._failed is None else error_of(self._failed)

    def _serving(self) -> Started:
        if self._started is None:
            raise NotControllerError("the controller's process does not serve")
        return self._started

    def new_launch(self, timeout_s: float = COMMAND_TIMEOUT_S) -> int:
        """The next launch number, committed in the metadata log."""
        return self._ask("new_launch", timeout_s).launch

    def spark_loss(self, launch: int, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Spark reports the executor or task of this launch as lost: this launch's broker is fenced, and no other."""
        self._ask("spark_loss", timeout_s, launch)

    def stop_brokers(self, timeout_s: float) -> tuple[int, ...]:
        """Controlled shutdown of all brokers; returns the ids of those that have left, once all have.

        Raises RequestTimedOutError when some have not. In both cases no broker can register any more.
        """
        return tuple(self._ask("stop_brokers", timeout_s).broker_ids)

    def stop_broker(self, launch: int, timeout_s: float) -> tuple[int, ...]:
        """Controlled shutdown of one launch; its partitions move to other brokers. Returns () if it was not there."""
        return tuple(self._ask("stop_broker", timeout_s, launch).broker_ids)

    def status(self, timeout_s: float = COMMAND_TIMEOUT_S) -> ControllerStatus:
        """The registered brokers and the state of the partitions, as committed."""
        status = self._ask("status", timeout_s).status
        if status is None:
            raise InvalidRequestError("the controller's process answered without a status")
        return status

    def _ask(self, cmd: str, timeout_s: float, launch: int = -1) -> Answer:
        self._origin.check()  # A child's thread would wait for answers that its parent reads.
        with self._changed:
            self._check_usable()
            self._next_id += 1
            command = Command(id=self._next_id, cmd=cmd, launch=launch)
            self._answers[command.id] = None
            self._write(to_line(command))
            try:
                self._changed.wait_for(lambda: self._answers[command.id] is not None or self._ended, timeout_s)
            finally:
                answer = self._answers.pop(command.id)
            if answer is None:
                self._check_usable()
                raise RequestTimedOutError(f"the controller did not answer {cmd} within {timeout_s} s")
        if (error := error_of(answer)) is not None:
            raise error
        return answer

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("the controller is closed")
        if self._ended:
            raise NotControllerError(f"the controller's process ended (status {self._process.poll()}); see its stderr")

    def _write(self, line: bytes) -> None:
        if self._process.stdin is None:
            raise NotControllerError("the controller's process has no stdin")
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise NotControllerError(f"the controller's process takes no commands: {error}") from None

    def _read(self) -> None:
        try:
            while line := self._read_line():
                self._take(from_controller(line))
        except (OSError, ValueError, SparkBrokerError) as error:
            self._process.kill()  # Nobody could ask it for anything, and nobody would start another one.
            logger.warning("the controller's answers cannot be read, so its process ends: %s", error)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _read_line(self) -> bytes:
        return b"" if self._process.stdout is None else self._process.stdout.readline(MAX_LINE_BYTES)

    def _take(self, message: FromController) -> None:
        if isinstance(message, LogLine):
            try:
                log_fields(controller_logger, message.level, message.text, message.fields, message.traceback)
            except Exception as error:  # noqa: BLE001 (a filter or handler of the host raises it, and may do so again)
                traceback.print_exception(error)
            return
        with self._changed:
            match message:
                case Started():
                    self._started = message
                case Answer() if message.id in self._answers:  # otherwise the caller has given up
                    self._answers[message.id] = message
                case ControllerFailed():
                    self._failed = message
            self._changed.notify_all()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the process. Brokers are not stopped by this: see `stop_brokers`."""
        if self._origin.is_elsewhere:
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()  # the process ends at the end of its input
            except OSError as error:
                logger.info("the controller's process was gone already: %s", error)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout_s)
        if self._reader.ident is not None:
            self._reader.join(timeout_s)
        if self._process.stdout is not None:
            self._process.stdout.close()


def _environment() -> dict[str, str]:
    """The driver's environment, with this package where the driver found it (a checkout need not be installed)."""
    root = str(Path(errors.__file__).resolve().parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
