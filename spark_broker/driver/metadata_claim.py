"""The claim on a metadata directory: which cluster uses it, and whether that one is still alive.

Two controllers on one directory depose each other, and the second would take the first one's brokers. The metadata log
makes that safe; the claim prevents it from happening by mistake. It is one small file that the running controller
writes again and again.

Whether its owner lives is never judged by a pid alone. On the same machine the process must have the pid, the start
time and the pid namespace. From another machine only the beats count: a claim that does not change for a while is over.
No clocks are compared.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from spark_broker.broker.executor import is_running
from spark_broker.driver.metadata_store import ClaimStore, open_store
from spark_broker.errors import ClusterInUseError, MetadataStoreError
from spark_broker.protocol.wire import UNDECODABLE
from spark_broker.storage.filesystem import LOCAL, process_start_time
from spark_broker.threads import BeginAgain, Worker, start
from spark_broker.times import shown_ms

logger = logging.getLogger(__name__)

CLAIM = "claim.json"
BEAT_S = 3.0
WATCH_S = 10.0
"""How long a claim of another machine must not change before it counts as over."""

LOOK_S = 0.5


class Owner(msgspec.Struct, frozen=True):
    """A run of a cluster, and its driver's process. `since_ms`: UTC, by the driver's clock."""

    run: str
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_time: int
    since_ms: int

    @classmethod
    def here(cls, run: str, pid: int) -> Owner:
        """The owner of a run whose driver is the process `pid` of this machine."""
        return cls(
            run=run,
            host=platform.node(),
            boot_id=LOCAL.boot_id(),
            pid_namespace=_pid_namespace(),
            pid=pid,
            start_time=process_start_time(pid) or 0,
            since_ms=time.time_ns() // 1_000_000,
        )

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host} since {shown_ms(self.since_ms)}"


class Claim(msgspec.Struct, frozen=True):
    """The content of the file. `beat` rises while the owner lives; `ended`: the owner has given the directory up."""

    owner: Owner
    beat: int = 0
    ended: bool = False


def check_claim(store: ClaimStore, owner: Owner, *, watch_s: float = WATCH_S) -> None:
    """Raise ClusterInUseError while another cluster that is alive has the claim; OSError when it cannot be read."""
    claim = read_claim(store)
    if claim is None or claim.ended or claim.owner.run == owner.run or not _lives(store, claim, owner, watch_s):
        return
    raise ClusterInUseError(f"{store} is in use by {claim.owner}; stop it first, or --take-over")


def check_claim_of(url: str) -> None:
    """`check_claim` before anything is started. Raises ClusterInUseError and MetadataStoreError."""
    try:
        check_claim(open_store(url), Owner.here("", os.getpid()))
    except OSError as error:
        raise MetadataStoreError(f"{url}: {error}") from error


def end_claim(store: ClaimStore, run: str) -> None:
    """Give the claim up, if this run has it: the next cluster then starts without a question."""
    claim = read_claim(store)
    if claim is not None and claim.owner.run == run and not claim.ended:
        store.put(CLAIM, msgspec.json.encode(msgspec.structs.replace(claim, ended=True)))


def end_claim_of(url: str, run: str) -> None:
    """`end_claim` by the directory's URL, for a controller that could not do it. A store that fails is logged."""
    try:
        end_claim(open_store(url), run)
    except (OSError, MetadataStoreError) as error:
        logger.warning("%s still counts as in use: %s", url, error)


def read_claim(store: ClaimStore) -> Claim | None:
    """The claim; None where there is none. A file that is no claim counts as none, and keeps no cluster out."""
    try:
        data = store.read(CLAIM)
        return None if data is None else msgspec.json.decode(data, type=Claim)
    except (MetadataStoreError, *UNDECODABLE) as error:
        logger.warning("%s: %s is no claim: %s", store, CLAIM, error)
        return None


class ClaimKeeper(Worker):
    """Writes the claim, beat after beat, until `end`. While another owner who lives has it, this one waits.

    Which of them is the controller is decided by the metadata log, and not here: the other one's controller ends, and
    then the claim is this one's again. A beat of a controller that is being deposed may come after its successor's
    first claim, and of two that start at the same time the one that fails may have claimed last.
    """

    def __init__(self, store: ClaimStore, owner: Owner, *, beat_s: float = BEAT_S, watch_s: float = WATCH_S) -> None:
        self._ended = threading.Event()
        super().__init__("claim", BeginAgain(self._ended.is_set))
        self._store = store
        self._claim = Claim(owner)
        self._others: tuple[Claim, float] | None = None  # the other owner's claim, and since when it is this
        self._beat_s = beat_s
        self._watch_s = watch_s
        self._lock = threading.Lock()
        self._over = False

    def take(self) -> None:
        """Claim the directory, even if another owner has it, and keep it. Raises OSError, and NoThreadError."""
        self._store.put(CLAIM, msgspec.json.encode(self._claim))
        start(self)

    def holder(self) -> str:
        """Which owner has the directory now, as text for people."""
        try:
            claim = read_claim(self._store)
        except OSError as error:
            return f"who has it now cannot be read: {error}"
        return "nobody claims it" if claim is None else f"it is claimed by {claim.owner}"

    def end(self) -> None:
        """Give the claim up. Raises OSError."""
        self._ended.set()
        with self._lock:
            self._over = True
            end_claim(self._store, self._claim.owner.run)

    def work(self) -> None:
        failed = False
        while not self._ended.wait(self._beat_s):
            try:
                with self._lock:
                    self._beat()
            except OSError as error:
                logger.log(logging.DEBUG if failed else logging.WARNING, "the claim was not renewed: %s", error)
                failed = True
            else:
                failed = False

    def _beat(self) -> None:
        """Renew the claim, but not over one whose owner lives: a controller that was deposed must not look alive."""
        claim = read_claim(self._store)
        if self._over or (claim is not None and self._is_anothers(claim)):
            return
        self._claim = msgspec.structs.replace(self._claim, beat=self._claim.beat + 1)
        self._store.put(CLAIM, msgspec.json.encode(self._claim))

    def _is_anothers(self, claim: Claim) -> bool:
        """Whether it is the claim of another owner who beats, as far as that is known."""
        if claim.owner.run == self._claim.owner.run or claim.ended:
            self._others = None
            return False
        if self._others is None or self._others[0] != claim:
            self._others = claim, time.monotonic()
        return time.monotonic() - self._others[1] < self._watch_s


def _lives(store: ClaimStore, claim: Claim, me: Owner, watch_s: float) -> bool:
    there = claim.owner
    if (there.boot_id, there.pid_namespace) == (me.boot_id, me.pid_namespace):
        return is_running(there.pid, there.start_time)
    logger.warning("%s was claimed by %s; watching for %g s whether that is alive", store, there, watch_s)
    return _eventually(lambda: read_claim(store) != claim, watch_s)


def _eventually(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(min(LOOK_S, timeout_s))
    return True


def _pid_namespace() -> str:
    """Pids name the same processes only within one namespace: containers of a machine share its boot id."""
    try:
        return os.readlink(Path("/proc/self/ns/pid"))
    except OSError:
        return ""
