"""Finds out for each address why its broker has not answered. Each reason has its own remedy.

A time-out alone does not say whether a process listens. The kernel takes connections for a process that is overloaded
or frozen. It refuses them where there is no process. So a client tries to connect before it gives up.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from spark_broker.client.settings import Address
from spark_broker.errors import (
    BootstrapUnreachableError,
    InconsistentClusterIdError,
    NetworkError,
    NoThreadError,
    RequestTimedOutError,
    SparkBrokerError,
    ThrottlingQuotaExceededError,
)
from spark_broker.process_limits import NO_DESCRIPTOR
from spark_broker.threads import Worker, start

CONNECT_TIMEOUT_S = 0.5

SILENT = "takes connections, but has not answered: it is overloaded or frozen; look at its log and its machine's load"
LISTENS = "takes connections now; look at its log, or at what else may listen there"
REFUSES = "refuses connections: no process listens there"
UNKNOWN_NAME = "its name cannot be resolved"
AWAY = "takes no connection: its machine is down or busy, or a firewall is between"
NOT_ASKED = "cannot be asked: this process has no descriptor left (ulimit -n)"


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A broker that was asked, and the error of the attempt."""

    address: Address
    error: SparkBrokerError

    @property
    def no_broker_there(self) -> bool:
        """Whether nobody listens there, or something else does."""
        return isinstance(self.error, NetworkError) and (self.error.nobody_there or self.error.foreign)

    @property
    def is_of_another_cluster(self) -> bool:
        return isinstance(self.error, InconsistentClusterIdError)


def no_broker_answered(asked: Sequence[Unanswered], *, all_asked: bool = True) -> SparkBrokerError:
    """The error to raise at once. `explained` adds more reasons to it. `all_asked`: no address was left out."""
    reasons = "; ".join(_named(answer.address, answer.error.message) for answer in asked)
    if all_asked and all(answer.no_broker_there for answer in asked):
        return BootstrapUnreachableError(f"no broker answered: {reasons}")
    if all_asked and all(isinstance(answer.error, ThrottlingQuotaExceededError) for answer in asked):
        return ThrottlingQuotaExceededError(f"every broker is overloaded: {reasons}")
    if all_asked and all(answer.no_broker_there or answer.is_of_another_cluster for answer in asked):
        return InconsistentClusterIdError(f"no broker of this client's cluster answered: {reasons}")
    return RequestTimedOutError(f"no broker answered in time: {reasons}")


def explained(error: SparkBrokerError, asked: Sequence[Unanswered]) -> SparkBrokerError:
    """The error again, with the reason of each address. Takes up to half a second."""
    if not asked or not isinstance(error, BootstrapUnreachableError | RequestTimedOutError):
        return error
    probes = [_Probe(address) for address in asked]
    reasons = "; ".join(probe.reason() for probe in probes)
    return type(error)(f"no broker answered: {reasons}")


class _Probe:
    """Tries one address in a thread of its own: a name server may take longer than callers want to wait."""

    def __init__(self, asked: Unanswered) -> None:
        self._asked = asked
        self._found = AWAY
        self._thread = Worker("probe", self._died, self._look)
        if not self._is_open:
            return
        try:
            start(self._thread)
        except NoThreadError as error:
            self._died(error)  # What is known of the address without it is told all the same.

    @property
    def _is_open(self) -> bool:
        """Whether the error leaves open why the broker has not answered."""
        error = self._asked.error
        return isinstance(error, RequestTimedOutError) or (isinstance(error, NetworkError) and not error.foreign)

    def reason(self) -> str:
        message = self._asked.error.message
        if not self._is_open:
            return _named(self._asked.address, message)
        if self._thread.ident is not None:
            self._thread.join(2 * CONNECT_TIMEOUT_S)
        return f"{self._asked.address} {self._found} ({message})"

    def _died(self, error: BaseException) -> None:
        self._found = f"could not be probed: {error!r}"

    def _look(self) -> None:
        address = self._asked.address
        try:
            with socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S):
                self._found = SILENT if isinstance(self._asked.error, RequestTimedOutError) else LISTENS
        except ConnectionRefusedError:
            self._found = REFUSES
        except (socket.gaierror, UnicodeError):
            self._found = UNKNOWN_NAME
        except OSError as error:
            self._found = NOT_ASKED if error.errno in NO_DESCRIPTOR else AWAY


def _named(address: Address, message: str) -> str:
    return message if str(address) in message else f"{address}: {message}"
