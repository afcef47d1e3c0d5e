"""What a broker's log says of one replica: each change of its role, epoch, ISR or log is a line that says why.

Nothing here is on the path of a batch. The number of lines is bounded. A role, epoch or ISR changes only by a record of
the controller's log. A truncation follows a new leader epoch. A restart is tried again once a second. Of fetches that
fail, only the first and the end of the failures are logged, each at most once in `FLAPPING_MS`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from spark_broker.core.events import LeaderAndIsr
from spark_broker.core.replica import Replica, Role
from spark_broker.errors import DivergedLogError
from spark_broker.storage.cleaner import PassResult

logger = logging.getLogger(__name__)

FLAPPING_MS = 1000
"""A fetch that fails again within this time after it worked is not logged as a new failure."""


@dataclass(frozen=True, slots=True)
class Before:
    """What a replica was before an event."""

    role: Role
    assignment: LeaderAndIsr


class ConnectionLines:
    """The lines about all replication from one broker: when it begins to fail, and when it works again.

    `address`: the leader's. For one thread.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._failed_ms: int | None = None  # since when; None: it works
        self._worked_ms = -FLAPPING_MS

    def failed(self, now_ms: int, why: object) -> None:
        """A stream broke, or could not be opened. Only the first time is logged."""
        if self._failed_ms is None and now_ms - self._worked_ms >= FLAPPING_MS:
            self._failed_ms = now_ms
            fields = {"leader_address": self._address, "why": str(why)}
            logger.info("replication from %(leader_address)s begins to fail: %(why)s", fields)

    def worked(self, now_ms: int) -> None:
        """An answer came."""
        if self._failed_ms is not None:
            fields = {"leader_address": self._address, "failed_ms": now_ms - self._failed_ms}
            self._failed_ms, self._worked_ms = None, now_ms
            logger.info("replication from %(leader_address)s works again, after %(failed_ms)d ms", fields)


class ReplicaLines:
    """The lines about one replica. `name` is its topic-partition. One thread writes at a time."""

    def __init__(self, name: str, replica: Replica) -> None:
        self._name = name
        self._replica = replica
        self._fetch_failed_ms: int | None = None  # since when; None: it works
        self._fetch_worked_ms = -FLAPPING_MS

    def compacted(self, result: PassResult) -> None:
        """A pass of compaction has ended. `result`: what it has done."""
        if not result.segments_before:
            return
        fields = {
            "clean_to": result.clean_to,
            "segments": result.segments_before,
            "new_segments": result.segments_after,
            "bytes": result.bytes_before,
            "new_bytes": result.bytes_after,
            "records": result.records_removed,
        }
        text = (
            "compacted up to %(clean_to)d: %(segments)d segments of %(bytes)d bytes -> %(new_segments)d of "
            "%(new_bytes)d, %(records)d records removed"
        )
        self._line(logging.INFO, text, **fields)

    def before(self) -> Before:
        """To be handed to `assigned`."""
        return Before(self._replica.role, self._replica.assignment)

    def assigned(self, before: Before) -> None:
        """The controller's assignment was carried out: log what changed."""
        now, was = self._replica.assignment, before.assignment
        if self._replica.role is not before.role or now.leader_epoch != was.leader_epoch:
            self._changed_role(before)
        elif self._replica.role is Role.LEADER and now.isr != was.isr:
            isrs = {"isr": now.isr, "old_isr": was.isr, "partition_epoch": now.partition_epoch}
            text = "ISR %(old_isr)s -> %(isr)s in leader epoch %(leader_epoch)d, log end %(offset)d"
            self._line(logging.INFO, text, **isrs)

    def _changed_role(self, before: Before) -> None:
        now = self._replica.assignment
        self._fetch_failed_ms = None  # another leader, or none
        if not logger.isEnabledFor(logging.INFO):
            return
        fields = {
            **self._fields(),
            "old_role": before.role.value,
            "old_leader_epoch": before.assignment.leader_epoch,
            "leader": now.leader,
            "isr": now.isr,
            "partition_epoch": now.partition_epoch,
        }
        text = "%(topic_partition)s: %(old_role)s -> %(role)s, leader epoch %(old_leader_epoch)d -> %(leader_epoch)d"
        log = "log from %(log_start_offset)d to %(offset)d, high watermark %(high_watermark)d"
        line = f"{text}, leader %(leader)d, ISR %(isr)s, {log}"
        logger.info(line, fields)

    def opened(self, start: str) -> None:
        """Its log was opened, and recovered after a crash. `start`: the kind of this start."""
        text = "opened (%(start)s): log from %(log_start_offset)d to %(offset)d"
        self._line(
            logging.INFO,
            f"{text}, newest leader epoch %(log_epoch)d",
            start=start,
            log_epoch=self._replica.epochs.latest_epoch,
        )

    def stopping(self, why: object) -> None:
        """It serves nothing any more. Logged once."""
        if self._replica.role is not Role.STOPPED:
            text = "stopped at offset %(offset)d in leader epoch %(leader_epoch)d: %(why)s"
            self._line(logging.INFO, text, why=str(why))

    def deleted(self, why: object) -> None:
        """Its files are gone."""
        self._line(logging.INFO, "deleted: %(why)s", why=str(why))

    def quarantined(self, why: object) -> None:
        """It was found damaged."""
        what = "is kept aside" if isinstance(why, DivergedLogError) else "is damaged and quarantined"
        text = f"{what} in leader epoch %(leader_epoch)d, log end %(offset)d: %(why)s"
        self._line(logging.ERROR, text, why=str(why))

    def unreadable(self, why: object) -> None:
        """It is the only copy, and a part of it cannot be read."""
        text = "a part cannot be read, and no other replica has it; the rest is served: %(why)s"
        self._line(logging.ERROR, text, why=str(why))

    def truncated(self, began: int, why: str) -> None:
        """Its log ended at `began`, and ends at `offset` now."""
        text = "truncated from %(old_offset)d to %(offset)d: %(why)s"
        self._line(logging.INFO, text, old_offset=began, why=why)

    def restarted(self, began: int, why: str) -> None:
        """Its log was dropped, and begins anew at a higher offset."""
        text = "restarted at %(offset)d in leader epoch %(leader_epoch)d; the log that ended at %(old_offset)d is gone"
        self._line(logging.INFO, f"{text}: %(why)s", old_offset=began, why=why)

    def fetch_failed(self, level: int, now_ms: int, why: object) -> None:
        """A fetch from the leader ended in an error. Only the first of several is logged."""
        if self._fetch_failed_ms is None and now_ms - self._fetch_worked_ms >= FLAPPING_MS:
            text = "fetches from broker %(leader)d begin to fail at %(offset)d in leader epoch %(leader_epoch)d"
            leader = self._replica.assignment.leader
            self._line(level, f"{text}: %(why)s", leader=leader, why=str(why))
            self._fetch_failed_ms = now_ms

    def fetched(self, now_ms: int) -> None:
        """A fetch from the leader worked. Only the first after an error is logged."""
        if self._fetch_failed_ms is None:
            return
        failed_ms, self._fetch_failed_ms, self._fetch_worked_ms = now_ms - self._fetch_failed_ms, None, now_ms
        text = "fetches from broker %(leader)d work again at %(offset)d in leader epoch %(leader_epoch)d"
        leader = self._replica.assignment.leader
        self._line(logging.INFO, f"{text}, after %(failed_ms)d ms", leader=leader, failed_ms=failed_ms)

    def _line(self, level: int, text: str, **fields: object) -> None:
        if logger.isEnabledFor(level):
            line = f"%(topic_partition)s: {text}"
            logger.log(level, line, {**self._fields(), **fields})

    def _fields(self) -> dict[str, object]:
        replica = self._replica
        return {
            "topic_partition": self._name,
            "role": replica.role.value,
            "leader_epoch": replica.assignment.leader_epoch,
            "offset": replica.log_end_offset,
            "high_watermark": replica.high_watermark,
            "log_start_offset": replica.log_start_offset,
        }
