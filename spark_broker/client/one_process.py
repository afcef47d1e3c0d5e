"""Clients belong to the process that opened them."""

from __future__ import annotations

from typing import NoReturn

from spark_broker.errors import InvalidDataError


class OfOneProcess:
    """A client. Its threads and connections are this process's, so it cannot be pickled, sent to a task, or copied."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        name = type(self).__name__
        raise InvalidDataError(
            f"a {name} cannot be pickled or copied: its threads and connections belong to this process",
            hint="Hand on its settings (text such as bootstrap.servers), and open a client where it is used: in Spark, "
            "in the function of foreachPartition or mapInArrow. Writers of one job share a TransactionGroup, which can "
            "be pickled.",
        )
