"""What ends a schedule: a rule of the replicated log is broken."""

from __future__ import annotations


class ViolationError(Exception):
    """`rule`: the name of the check, for statistics; `partition`: which one it is about, if it is about one."""

    def __init__(self, rule: str, message: str, partition: str = "") -> None:
        super().__init__(message)
        self.rule = rule
        self.message = message
        self.partition = partition


def require(condition: bool, rule: str, message: str, partition: str = "") -> None:
    """Raises ViolationError unless the condition holds. Where the message is costly, check and raise without this."""
    if not condition:
        raise ViolationError(rule, message, partition)
