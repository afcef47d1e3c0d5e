"""The controller's process: `python -m spark_broker.driver.controller_process`, a child of the driver.

Its first line of input is a `ControllerConfig`, its first line of output `Started`; then each line of input is a
`Command`, answered by an `Answer` with its id. It ends at the end of its input, when its parent is gone, or when it
cannot go on. A busy notebook cell in the driver therefore fences nobody.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import BinaryIO, NoReturn

from spark_broker.config import ClusterConfig, ClusterSettings, TopicConfig
from spark_broker.driver.controller_pipe import (
    MAX_LINE_BYTES,
    Answer,
    BrokerStatus,
    Command,
    ControllerConfig,
    ControllerStatus,
    Started,
    from_line,
    to_line,
)
from spark_broker.driver.controller_service import ControllerService
from spark_broker.driver.metadata_log import MetadataLog
from spark_broker.errors import InvalidRequestError, SparkBrokerError
from spark_broker.model import NO_LEADER

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0002
"""One busy Python thread must not make the others wait 5 ms at every turn."""

PARENT_CHECK_S = 0.5
COMMAND_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 3600.0
"""How long a stop is awaited at most; its asker gives up sooner."""


class Output:
    """Lines to the driver, from any thread."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, message: Started | Answer) -> None:
        with self._lock:
            self._stream.write(to_line(message))
            self._stream.flush()


def main() -> None:
    """Run until the input ends. Exits with 1 on failure."""
    parent = os.getppid()
    source, output = _take_over_standard_streams()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    threading.Thread(target=_end_with_parent, args=(parent,), name="parent-watch", daemon=True).start()
    try:
        service = _serve(source, output)
    except SparkBrokerError as error:
        output.write(Started(error_code=error.code, error_message=error.message))
        _end(1)
    for line in iter(lambda: source.readline(MAX_LINE_BYTES), b""):
        _run(service, line, output)
    service.close()
    _end(0)


def _take_over_standard_streams() -> tuple[BinaryIO, Output]:
    """Commands and answers get descriptors of their own, so that no library's print can come between them."""
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return source, Output(target)


def _end(status: int) -> NoReturn:
    """Leave at once: a Flight server with an idle stream cannot be shut down, and an ordinary exit would wait."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


def _end_with_parent(parent: int) -> None:
    """The end of the input says that the driver is gone, unless a child of its own inherited the pipe.

    PR_SET_PDEATHSIG would not do: it fires when the *thread* that started this process ends.
    """
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(PARENT_CHECK_S)
    _end(0)


def _serve(source: BinaryIO, output: Output) -> ControllerService:
    config = from_line(source.readline(MAX_LINE_BYTES), ControllerConfig)
    logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s controller: %(message)s")
    settings = ClusterSettings(cluster=ClusterConfig.parse(config.cluster), topic=TopicConfig.parse(config.topic))
    log = MetadataLog.open(
        config.metadata_dir,
        records_between_snapshots=settings.cluster.metadata_log_max_records_between_snapshots,
        snapshots_kept=settings.cluster.metadata_max_snapshots,
    )
    log.check_cluster_id(config.known_cluster_ids)
    service = ControllerService(settings, log, _fail, shared_executor=config.shared_executor)
    service.start(config.host, config.port)
    image = service.image
    output.write(Started(port=service.port, cluster_id=image.cluster_id, controller_epoch=image.controller_epoch))
    return service


def _fail(error: BaseException) -> NoReturn:
    """Deposed, no metadata store, or a bug: nothing that this process still says may count."""
    logger.critical("the controller ends: %s", error, exc_info=error)
    _end(1)


def _run(service: ControllerService, line: bytes, output: Output) -> None:
    """Answer a command: in a thread of its own if it may take long."""
    try:
        command = from_line(line, Command)
    except InvalidRequestError as error:
        output.write(Answer(id=-1, error_code=error.code, error_message=error.message))
        return
    if command.cmd in ("stop_brokers", "stop_broker"):
        name = f"command-{command.id}"
        threading.Thread(target=_answer, args=(service, command, output), name=name, daemon=True).start()
    else:
        _answer(service, command, output)


def _answer(service: ControllerService, command: Command, output: Output) -> None:
    try:
        answer = _execute(service, command)
    except SparkBrokerError as error:
        answer = Answer(id=command.id, error_code=error.code, error_message=error.message)
    except Exception as error:
        logger.exception("the command %s failed", command.cmd)
        _fail(error)
    output.write(answer)


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
