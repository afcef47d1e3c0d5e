"""What a broker is started with: written by the launcher, read by the broker's process."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass, field

import msgspec

from spark_broker.errors import InvalidRequestError
from spark_broker.protocol.wire import UNDECODABLE


def new_secret() -> str:
    """What nobody can guess: a token for a keeper's job, or a part of a launch's name. Every user of the machine can
    read the name while the broker runs, so another launch has another secret."""
    return secrets.token_hex(16)


@dataclass(frozen=True, kw_only=True)
class BrokerSpec:
    """One launch of one broker.

    `launch` is the number that the metadata log gave it: a higher one fences it. `log_dirs` is the absolute directory
    under which the broker claims its own log directory. `host` is what it binds and advertises. `executor_id` is where
    the launcher meant it to run. The keeper replaces it by the executor where it does run, and fills in `executor_pid`.
    `replaces`: launches that are over. If a process of theirs still holds a log directory, it is ended.
    `earlier_launches`: launches up to this number, which an earlier driver started, are over as well.
    `secret`: part of the name under which keepers find the process. Nobody else can take the name first.
    """

    cluster_id: str
    controller_host: str
    controller_port: int
    launch: int
    log_dirs: str
    host: str
    rack: str | None
    executor_id: str
    settings: dict[str, str]
    topic_defaults: dict[str, str]
    secret: str = field(repr=False)
    executor_pid: int = -1
    replaces: tuple[int, ...] = ()
    earlier_launches: int = -1

    def supersedes(self, launch: int) -> bool:
        """Whether that launch is over, so that a process of it must not keep a log directory from this one."""
        return launch in self.replaces or launch <= self.earlier_launches

    def to_json(self) -> bytes:
        """One line of JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> BrokerSpec:
        """The spec that `to_json` wrote. Raises InvalidRequestError."""
        try:
            return msgspec.json.decode(data, type=cls)
        except UNDECODABLE as error:
            raise InvalidRequestError(f"a broker specification that does not decode: {error}") from None

    def on_executor(self, executor_id: str, executor_pid: int) -> BrokerSpec:
        """The same launch, on the executor where it really runs."""
        return dataclasses.replace(self, executor_id=executor_id, executor_pid=executor_pid)


STOPPED = "stopped"
"""A broker's end: it was asked to leave and left in order."""

MOVED = "moved"
"""A broker's end: it left in order, because its executor is going away; another launch takes its place."""

SUPERSEDED = "superseded"
"""A broker's end: a later launch has taken its place."""

FAILED = "failed"
"""The broker refused to start, or stopped on an error: `error_code` and `error_message` say which."""

LOST = "lost"
"""The process or its executor is gone, or it left because its executor went away: another launch takes its place."""


@dataclass(frozen=True, kw_only=True)
class BrokerOutcome:
    """How a launch ended: one of the reasons above, or another reason that the broker gave."""

    reason: str
    error_code: int = 0
    error_message: str = ""

    def to_json(self) -> bytes:
        """One line of JSON, as keepers hand it on."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> BrokerOutcome:
        """The outcome that `to_json` wrote. Raises InvalidRequestError."""
        try:
            return msgspec.json.decode(data, type=cls)
        except UNDECODABLE as error:
            raise InvalidRequestError(f"a broker outcome that does not decode: {error}") from None
