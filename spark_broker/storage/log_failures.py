"""What becomes of a log when the system refuses or fails one of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from spark_broker.errors import KafkaStorageError, ProcessLimitError, SparkBrokerError
from spark_broker.storage.files import HalfDoneError, is_refusal, storage_error


class FailingLog:
    """The part of a log that says whether it can be used further."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._unusable: SparkBrokerError | None = None

    @property
    def is_unusable(self) -> bool:
        """Whether every later call is refused: something has failed, or was refused half-way."""
        return self._unusable is not None

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise type(self._unusable)(self._unusable.message)

    @contextmanager
    def _failing(self, action: str) -> Iterator[None]:
        try:
            yield
        except (OSError, KafkaStorageError) as error:
            self._fail(action, error)

    def _fail(self, action: str, error: OSError | KafkaStorageError) -> NoReturn:
        """After a refusal that has changed nothing, the log goes on. After other errors every call is refused. Where
        that was a refusal half-way, or by a limit, the log can be opened anew."""
        if isinstance(error, KafkaStorageError):
            self._unusable = error
            raise error
        refused = storage_error(error, f"{action} in {self.directory}")
        if not is_refusal(error) or isinstance(error, HalfDoneError) or isinstance(refused, ProcessLimitError):
            self._unusable = refused
        raise refused from error
