"""Which commit of a consumer came last. One that was given up may come late, behind newer ones.

A client that has waited in vain sends a commit again, to whoever coordinates the group then. The first request may
still be in a buffer of the network, or of a broker that stood still. If it were taken then, the group would fall back
to where it was. The leader epoch that it names tells a coordinator what was meant for an earlier leadership; within
one, the order of each committer does.
"""

from __future__ import annotations

from collections import OrderedDict

from spark_broker.errors import CoordinatorNotAvailableError, InvalidRequestError
from spark_broker.protocol.messages import OffsetCommitRequest

COMMITTERS_MAX = 10_000


class CommitOrder:
    """Of one shard, in one leadership, however often it is loaded. It remembers the committers that were heard last."""

    def __init__(self, leader_epoch: int) -> None:
        self.leader_epoch = leader_epoch
        self._last: OrderedDict[tuple[str, str], int] = OrderedDict()  # by group and committer

    def check_epoch(self, named: int) -> None:
        """Raises CoordinatorNotAvailableError for what was meant for another leadership: its client looks again."""
        if named >= 0 and named != self.leader_epoch:
            ours = self.leader_epoch
            raise CoordinatorNotAvailableError(f"it is for leader epoch {named}; this is leader epoch {ours}")

    def check(self, request: OffsetCommitRequest) -> None:
        """Raises as `check_epoch`, and InvalidRequestError for a commit that newer ones have overtaken: its client has
        given it up. The same one may come again.
        """
        self.check_epoch(request.coordinator_epoch)
        if not request.committer:
            return
        committer = (request.group_id, request.committer)
        last = self._last.get(committer, request.sequence)
        if request.sequence < last:
            raise InvalidRequestError(f"commit {request.sequence} comes after commit {last} of the same consumer")
        self._last[committer] = request.sequence
        self._last.move_to_end(committer)
        if len(self._last) > COMMITTERS_MAX:
            self._last.popitem(last=False)
