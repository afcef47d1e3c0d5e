"""Groups of consumers that are processes, on three brokers that are processes: how fast partitions move.

`python -m benchmarks.group_members <JSON>` is a member's process: it joins and leaves as lines on stdin say, and tells
what happens to it and when. The clock is the machine's, so times of several processes compare.
"""

from __future__ import annotations

import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import msgspec

from benchmarks.failover import Distribution
from benchmarks.figures import Figure
from spark_broker.client.admin import Admin
from spark_broker.client.consumer import Consumer
from spark_broker.client.producer import Producer
from spark_broker.client.rebalance_listener import RebalanceListener
from spark_broker.model import NewTopic, TopicPartition
from tests.support.process_cluster import ProcessCluster

BROKERS = 3
TOPIC = "shared"
KILLED_SESSION_MS = 3000
SESSION_MS = 45_000
POLL_S = 0.1
TIMEOUT_S = 120.0
ROOT = Path(__file__).resolve().parent.parent


class MembersFigures(msgspec.Struct, frozen=True):
    """Milliseconds. `together_ms`: from the first of all that join at once to settled; `join_ms`: from the last of
    them; `leave_ms`: until all partitions of one that leaves are read by others; `kill_ms`: the same after a kill, past
    `killed_session_ms`. `restarts`: of static members; `moved`: partitions that others were given meanwhile, or lost.
    """

    members: int
    partitions: int
    killed_session_ms: int
    together_ms: list[float]
    join_ms: list[float]
    leave_ms: list[float]
    kill_ms: list[float]
    restarts: int
    moved: int


class Order(msgspec.Struct, frozen=True):
    """Who a process is to be."""

    bootstrap: str
    group: str
    session_ms: int
    instance_id: str = ""


class Told(msgspec.Struct, frozen=True, array_like=True):
    """A line of a member's process. `at_s`: monotonic. `values`: the records that were read."""

    what: str
    at_s: float
    partitions: list[int] = []
    values: list[bytes] = []


# In the member's process.


class _Teller(RebalanceListener):
    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        _tell("assigned", [tp.partition for tp in partitions])

    def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        _tell("revoked", [tp.partition for tp in partitions])


def _tell(what: str, partitions: list[int], values: list[bytes] | None = None) -> None:
    line = msgspec.json.encode(Told(what, time.monotonic(), partitions, values or []))
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Join and leave as told, until stdin ends."""
    order = msgspec.json.decode(sys.argv[1], type=Order)
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(commands,), daemon=True).start()
    _tell("ready", [])
    while commands.get() == "join":
        _tell("joining", [])
        with Consumer(
            order.bootstrap,
            group_id=order.group,
            topics=[TOPIC],
            listener=_Teller(),
            auto_offset_reset="earliest",
            group_instance_id=order.instance_id,
            session_timeout_ms=order.session_ms,
        ) as consumer:
            while commands.empty():
                for batch in consumer.poll(POLL_S):
                    _tell("read", [batch.partition], batch.data.column("value").to_pylist())
            commands.get()
            _tell("leaving", [])
        _tell("left", [])


def _listen(commands: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        commands.put(line.strip())
    commands.put("")


# In the process that measures.


class Member:
    """A member's process. `owned`, `told`: guarded by the condition of its group."""

    def __init__(self, order: Order, changed: threading.Condition) -> None:
        self.owned: set[int] = set()
        self.told: list[Told] = []
        self._changed = changed
        command = [sys.executable, "-m", "benchmarks.group_members", msgspec.json.encode(order).decode()]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT)
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = msgspec.json.decode(line, type=Told)
            with self._changed:
                self.told.append(told)
                if told.what == "assigned":
                    self.owned.update(told.partitions)
                elif told.what == "revoked":
                    self.owned.difference_update(told.partitions)
                self._changed.notify_all()

    def say(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()

    def last_s(self, what: str) -> float:
        """When it said so last; under the condition."""
        return max((told.at_s for told in self.told if told.what == what), default=0.0)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        with self._changed:
            self.owned.clear()


class Group:
    """The members of one group, over all partitions of the topic."""

    def __init__(
        self, bootstrap: str, name: str, members: int, partitions: int, session_ms: int, *, static: bool = False
    ) -> None:
        self.changed = threading.Condition()
        self.partitions = partitions
        self._orders = [Order(bootstrap, name, session_ms, f"instance-{n}" if static else "") for n in range(members)]
        self.members = [Member(order, self.changed) for order in self._orders]
        self.wait_for(lambda: all(member.last_s("ready") for member in self.members), "the processes")

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Raises TimeoutError."""
        with self.changed:
            if not self.changed.wait_for(condition, TIMEOUT_S):
                raise TimeoutError(f"waited in vain for {what}: {[len(member.owned) for member in self.members]}")

    def settled(self, members: Sequence[Member]) -> bool:
        """Whether these members own everything, each partition once, evenly."""
        owners = Counter(number for member in members for number in member.owned)
        sizes = [len(member.owned) for member in members]
        return len(owners) == owners.total() == self.partitions and max(sizes) - min(sizes) <= 1

    def settle(self, members: Sequence[Member]) -> float:
        """Wait until they have settled. Returns when the last of them heard of it."""
        self.wait_for(lambda: self.settled(members), f"{len(members)} members to share")
        with self.changed:
            return max(member.last_s("assigned") for member in members)

    def replace(self, at: int) -> None:
        """A killed member's next process."""
        self.members[at] = Member(self._orders[at], self.changed)
        self.wait_for(lambda: self.members[at].last_s("ready"), "the process")

    def said_s(self, member: Member, what: str, since_s: float) -> float:
        """Wait until the member says so; returns when it did."""
        self.wait_for(lambda: member.last_s(what) > since_s, what)
        return member.last_s(what)

    def read_s(self, members: Sequence[Member], value: bytes, count: int) -> float:
        """Wait until so many members' partitions have brought this value; returns when the last did."""

        def times() -> list[float]:
            return [told.at_s for member in members for told in member.told if value in told.values]

        self.wait_for(lambda: len(times()) >= count, f"{count} records")
        with self.changed:
            return max(times())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.end()


class Measuring:
    """The measurements, one after the other."""

    def __init__(self, bootstrap: str, members: int, partitions: int) -> None:
        self._bootstrap, self._members, self._partitions = bootstrap, members, partitions
        self._producer = Producer(bootstrap, acks="all")
        self._numbers = itertools.count()

    def _group(self, name: str, session_ms: int = SESSION_MS, *, static: bool = False) -> Group:
        return Group(self._bootstrap, name, self._members, self._partitions, session_ms, static=static)

    def _append(self, partitions: Iterable[int]) -> bytes:
        """A value of its own to each of the partitions, each acknowledged."""
        value = b"%d" % next(self._numbers)
        for future in [self._producer.send(TOPIC, value, partition=number) for number in partitions]:
            future.result(TIMEOUT_S)
        return value

    @staticmethod
    def _join(group: Group, members: Sequence[Member]) -> tuple[list[float], float]:
        """When each joined, and when all of the group's joined members were settled."""
        began = time.monotonic()
        for member in members:
            member.say("join")
        joined = [group.said_s(member, "joining", began) for member in members]
        present = [member for member in group.members if member.last_s("joining") > member.last_s("left")]
        return joined, group.settle(present)

    def joins_and_leaves(self, times: int, together: int) -> tuple[list[float], list[float], list[float]]:
        """All at once, and then the last one again and again."""
        together_ms, join_ms, leave_ms = [], [], []
        with self._group("joining") as group:
            *others, last = group.members
            for _ in range(together):
                joined, settled = self._join(group, group.members)
                together_ms.append(_ms(min(joined), settled))
                began = time.monotonic()
                for member in group.members:
                    member.say("leave")
                for member in group.members:
                    group.said_s(member, "left", began)
            self._join(group, others)
            for _ in range(times):
                (joined_s,), settled = self._join(group, [last])
                join_ms.append(_ms(joined_s, settled))
                owned, began = set(last.owned), time.monotonic()
                last.say("leave")
                leaving = group.said_s(last, "leaving", began)
                value = self._append(owned)
                leave_ms.append(_ms(leaving, group.read_s(others, value, len(owned))))
                group.said_s(last, "left", began)
                group.settle(others)
        return together_ms, join_ms, leave_ms

    def kills(self, times: int) -> list[float]:
        """Past the session time-out."""
        took_ms = []
        with self._group("killed", KILLED_SESSION_MS) as group:
            self._join(group, group.members)
            for number in range(times):
                at = number % self._members
                victim = group.members[at]
                others = [member for member in group.members if member is not victim]
                owned, began = set(victim.owned), time.monotonic()
                os.kill(victim.process.pid, signal.SIGKILL)
                value = self._append(owned)
                took_ms.append(_ms(began, group.read_s(others, value, len(owned))) - KILLED_SESSION_MS)
                victim.end()
                group.settle(others)
                group.replace(at)
                self._join(group, [group.members[at]])
        return took_ms

    def rolling_restart(self) -> int:
        """Every static member leaves and comes back, one after the other. Returns how many partitions moved."""
        with self._group("static", static=True) as group:
            self._join(group, group.members)
            owned = [set(member.owned) for member in group.members]
            began = time.monotonic()
            for member, own in zip(group.members, owned, strict=True):
                said = time.monotonic()
                member.say("leave")
                group.said_s(member, "left", said)
                member.say("join")
                group.wait_for(lambda member=member, own=own: member.owned >= own, "its partitions")  # type: ignore[misc]
            group.settle(group.members)
            lost = sum(len(own - member.owned) for member, own in zip(group.members, owned, strict=True))
            assigned = [t for m in group.members for t in m.told if t.what == "assigned" and t.at_s > began]
            return lost + sum(len(each.partitions) for each in assigned) - self._partitions


def measure_members(members: int = 20, partitions: int = 200, times: int = 30, kills: int = 10) -> MembersFigures:
    """Measure on a cluster of its own."""
    with TemporaryDirectory() as base, ProcessCluster(Path(base), BROKERS) as cluster, ExitStack() as clients:
        bootstrap = cluster.bootstrap_servers
        admin = clients.enter_context(Admin(bootstrap))
        admin.create_topic(NewTopic(TOPIC, partitions, BROKERS, config={"min.insync.replicas": 2}))
        measuring = Measuring(bootstrap, members, partitions)
        together_ms, join_ms, leave_ms = measuring.joins_and_leaves(times, together=max(times // 6, 1))
        kill_ms = measuring.kills(kills)
        moved = measuring.rolling_restart()
    return MembersFigures(
        members, partitions, KILLED_SESSION_MS, together_ms, join_ms, leave_ms, kill_ms, members, moved
    )


def _ms(since_s: float, until_s: float) -> float:
    return round((until_s - since_s) * 1000, 1)


def figures(found: MembersFigures) -> list[Figure]:
    """The lines of the table."""
    of = f"{found.members} members and {found.partitions} partitions"
    killed = f"a killed member's partitions are read by others, past session.timeout.ms = {found.killed_session_ms:,}"
    return [
        Figure(f"{of}: from the last join to settled", str(Distribution.of(found.join_ms)), "under 1,000 ms"),
        Figure("all of them join at once, from the first one to settled", str(Distribution.of(found.together_ms))),
        Figure(killed, str(Distribution.of(found.kill_ms)), "under 500 ms"),
        Figure("a left member's partitions are read by others", str(Distribution.of(found.leave_ms)), "under 300 ms"),
        Figure(
            f"a rolling restart of {found.restarts} static members", f"{found.moved} partitions moved", "no partition"
        ),
    ]


if __name__ == "__main__":
    main()
