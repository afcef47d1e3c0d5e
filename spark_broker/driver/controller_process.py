"""The controller's process: `python -m spark_broker.driver.controller_process`, a child of the driver.

Its first line of input is a `ControllerConfig`, answered by `Started`; then each line of input is a `Command`,
answered by an `Answer` with its id. Lines of its log come between. It ends at the end of its input, when its parent is
gone, or when it cannot go on. Because it is a process of its own, a busy notebook cell in the driver fences no broker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from functools import partial
from typing import BinaryIO, NoReturn

from spark_broker.broker.repeats import Repeats
from spark_broker.config import ClusterConfig, ClusterSettings, TopicConfig
from spark_broker.driver.controller_log import PipeHandler
from spark_broker.driver.controller_pipe import (
    MAX_LINE_BYTES,
    Answer,
    BrokerStatus,
    Command,
    ControllerConfig,
    ControllerFailed,
    ControllerStatus,
    FromController,
    Started,
    from_line,
    to_line,
)
from spark_broker.driver.controller_service import ControllerService
from spark_broker.driver.metadata_claim import ClaimKeeper, Owner, check_claim
from spark_broker.driver.metadata_log import MetadataLog
from spark_broker.driver.metadata_store import open_store
from spark_broker.errors import (
    InvalidRequestError,
    MetadataStoreError,
    NoMemoryError,
    NoThreadError,
    SparkBrokerError,
    StaleControllerEpochError,
    UnknownServerError,
)
from spark_broker.model import NO_EPOCH, NO_LEADER
from spark_broker.process_limits import limit_reached
from spark_broker.short_pauses import ShortPauses
from spark_broker.storage.filesystem import PRIVATE_UMASK
from spark_broker.threads import Worker, begin

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0002
"""One busy Python thread must not make the others wait 5 ms at every turn."""

PARENT_CHECK_S = 0.5
COMMAND_TIMEOUT_S = 20.0
"""Shorter than the driver's own wait: the driver then gets an error that has a reason."""
END_TIMEOUT_S = 8.0
STOP_TIMEOUT_S = 3600.0
"""How long a stop is awaited at most; its asker gives up sooner."""
WAITING_COMMANDS = frozenset({"new_launch", "stop_brokers", "stop_broker"})
"""Commands that wait for a decision, and perhaps for a store that fails. Each runs in a thread of its own."""


class DriverPipe:
    """Lines to the driver, from any thread."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, message: FromController) -> None:
        with self._lock:
            self._stream.write(to_line(message))
            self._stream.flush()


def main() -> None:
    """Run until the input ends. Exits with 1 on failure."""
    parent = os.getppid()
    source, output = _take_over_standard_streams()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    ShortPauses().install()
    os.umask(PRIVATE_UMASK)
    process = ControllerProcess(output, parent)
    try:
        process.begin()
        config = from_line(source.readline(MAX_LINE_BYTES), ControllerConfig)
        process.log_to_driver(config.log_level)
        service = process.serve(config)
    except SparkBrokerError as error:
        output.write(Started(error_code=error.code, error_message=error.message))
        process.end(1)
    except Exception as error:  # noqa: BLE001 (the driver is told of it)
        process.fail(error)
    try:
        for line in iter(lambda: source.readline(MAX_LINE_BYTES), b""):
            process.run_command(service, line)
    except Exception as error:  # noqa: BLE001 (the driver is told of it)
        process.fail(error)
    logger.info("the controller, pid %d, epoch %d, ends: its driver closed it", os.getpid(), process.epoch)
    process.end(0)


class ControllerProcess:
    """The one controller of this process, and how both end. `parent`: the driver's pid."""

    def __init__(self, output: DriverPipe, parent: int) -> None:
        self._output = output
        self._parent = parent
        self._log: PipeHandler | None = None
        self._claim: ClaimKeeper | None = None
        self._service: ControllerService | None = None
        self._ending: Worker | None = None
        self._lock = threading.Lock()
        self._asked = threading.Event()  # to end
        self._last: tuple[int, ControllerFailed | None] | None = None  # the status and words of the first who asked

    def begin(self) -> None:
        """Start the threads that end the process: when it has to end, it may get no thread. Raises NoThreadError."""
        self._ending = begin("end", lambda _: os._exit(1), self._end_when_asked)
        begin("parent-watch", self.fail, self.end_with_parent)

    @property
    def epoch(self) -> int:
        """The controller epoch; NO_EPOCH before it has one."""
        return NO_EPOCH if self._service is None else self._service.image.controller_epoch

    def log_to_driver(self, level: str) -> None:
        """From now on what is logged here is logged by the driver."""
        self._log = PipeHandler(self._output.write)
        self._log.addFilter(Repeats())
        logging.basicConfig(level=level, handlers=[self._log])

    def serve(self, config: ControllerConfig) -> ControllerService:
        """Claim the metadata directory, take over its log, and serve. Raises the error that prevents it."""
        settings = ClusterSettings(cluster=ClusterConfig.parse(config.cluster), topic=TopicConfig.parse(config.topic))
        store = open_store(config.metadata_dir)
        owner = Owner.here(config.run, self._parent)
        try:
            if not config.take_over:
                check_claim(store, owner)
            log = MetadataLog(
                store,
                records_between_snapshots=settings.cluster.metadata_log_max_records_between_snapshots,
                snapshots_kept=settings.cluster.metadata_max_snapshots,
            )
            log.check_cluster_id(config.known_cluster_ids)
            self._claim = ClaimKeeper(store, owner)
            self._claim.take()
        except OSError as error:
            raise MetadataStoreError(f"{config.metadata_dir}: {error}") from error
        service = self._service = ControllerService(
            settings, log, self.fail, shared_executor=config.shared_executor, log_dirs=config.log_dirs
        )
        service.start(config.host, config.port, owner, accept_older_metadata=config.accept_older_metadata)
        image = service.image
        started = Started(port=service.port, cluster_id=image.cluster_id, controller_epoch=image.controller_epoch)
        self._output.write(started)
        return service

    def run_command(self, service: ControllerService, line: bytes) -> None:
        """Answer a command: in a thread of its own if it may take long. Where it gets none, the driver asks again."""
        try:
            command = from_line(line, Command)
        except InvalidRequestError as error:
            self._output.write(Answer(id=-1, error_code=error.code, error_message=error.message))
            return
        if command.cmd not in WAITING_COMMANDS:
            self._answer(service, command)
            return
        try:
            begin(f"command-{command.id}", self.fail, partial(self._answer, service, command))
        except NoThreadError as error:
            self._output.write(Answer(id=command.id, error_code=error.code, error_message=error.message))

    def _answer(self, service: ControllerService, command: Command) -> None:
        try:
            answer = _execute(service, command)
        except SparkBrokerError as error:
            answer = Answer(id=command.id, error_code=error.code, error_message=error.message)
        except Exception as error:
            logger.exception("the command %s failed", command.cmd)
            self.fail(error)
        self._output.write(answer)

    def fail(self, error: BaseException) -> NoReturn:
        """End the process: it is deposed, has no metadata store or has a bug. Nothing that it still sends may count."""
        words = ControllerFailed(NoMemoryError.code, "there is no memory to say more")
        with contextlib.suppress(MemoryError):
            words = self._last_words(error)
        self.end(1, words)

    def _last_words(self, error: BaseException) -> ControllerFailed:
        error = limit_reached(error) or error
        if not isinstance(error, SparkBrokerError):
            logger.critical("the controller ends on a bug: %s", error, exc_info=error)
        else:
            logger.error("the controller, pid %d, epoch %d, cannot go on: %s", os.getpid(), self.epoch, error)
        code = error.code if isinstance(error, SparkBrokerError) else UnknownServerError.code
        message = error.message if isinstance(error, SparkBrokerError) else f"{type(error).__name__}: {error}"
        if isinstance(error, StaleControllerEpochError) and self._claim is not None:
            message = f"{message}; {self._claim.holder()}"
        return ControllerFailed(code, message)

    def end_with_parent(self) -> None:
        """End the process when the driver is gone. The input does not end if a child of the driver inherited the pipe.

        PR_SET_PDEATHSIG would not do: it fires when the *thread* that started this process ends.
        """
        pause = threading.Event()
        while os.getppid() == self._parent:
            pause.wait(PARENT_CHECK_S)
        _say(f"the controller, pid {os.getpid()}, epoch {self.epoch}, ends: its driver, pid {self._parent}, is gone")
        self.end(0)

    def end(self, status: int, last: ControllerFailed | None = None) -> NoReturn:
        """End the process soon, even if the driver does not read or the store hangs: a deposed controller must end.

        An ordinary exit would wait for threads that are not daemons.
        """
        with self._lock:
            if self._last is None:
                self._last = (status, last)
        self._asked.set()
        if self._ending is not None:
            self._ending.join(END_TIMEOUT_S)
            if self._ending.is_alive():
                me = f"the controller, pid {os.getpid()}, epoch {self.epoch}"
                _say(f"{me}, is ended by force after {END_TIMEOUT_S} s")
        os._exit(status)

    def _end_when_asked(self) -> None:
        self._asked.wait()
        status, last = self._last or (1, None)
        if self._service is not None and status == 0:
            self._service.close()
        if last is not None:
            try:
                self._output.write(last)
            except OSError as error:
                logger.info("the driver is gone, too: %s", error)
        if self._claim is not None:
            try:
                self._claim.end()
            except OSError as error:
                logger.warning("the claim on the metadata directory stays: %s", error)
        if self._log is not None:
            self._log.drain()


def _say(text: str) -> None:
    """Write to standard error: the log goes to the driver, which may be gone. Its terminal may be gone, too."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _take_over_standard_streams() -> tuple[BinaryIO, DriverPipe]:
    """Commands and answers get descriptors of their own, so that no library's print can come between them."""
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return source, DriverPipe(target)


def _execute(service: ControllerService, command: Command) -> Answer:
    match command.cmd:
        case "new_launch":
            return Answer(id=command.id, launch=service.new_launch(COMMAND_TIMEOUT_S))
        case "spark_loss":
            service.spark_loss(command.launch)
            return Answer(id=command.id)
        case "stop_brokers":
            return Answer(id=command.id, broker_ids=list(service.stop_brokers(None, STOP_TIMEOUT_S)))
        case "stop_broker":
            return Answer(id=command.id, broker_ids=list(service.stop_brokers(command.launch, STOP_TIMEOUT_S)))
        case "status":
            return Answer(id=command.id, status=_status(service))
        case _:
            raise InvalidRequestError(f"unknown command {command.cmd!r}")


def _status(service: ControllerService) -> ControllerStatus:
    image = service.image
    brokers = [
        BrokerStatus(
            id=broker.id,
            epoch=broker.epoch,
            launch=broker.launch,
            host=broker.host,
            port=broker.port,
            rack=broker.rack,
            machine=broker.machine,
            executor_id=broker.executor_id,
            executor_pid=broker.executor_pid,
            pid=broker.pid,
            fenced=broker.fenced,
            in_controlled_shutdown=broker.in_controlled_shutdown,
        )
        for _, broker in sorted(image.brokers.items())
    ]
    return ControllerStatus(
        cluster_id=image.cluster_id,
        controller_epoch=image.controller_epoch,
        brokers=brokers,
        topics=len(image.topics),
        leaderless_partitions=sum(state.leader == NO_LEADER for _, _, state in image.partitions()),
    )


if __name__ == "__main__":
    main()
