"""Runs brokers on executors. A keeper's task runs on each executor with a broker, and carries out this host's orders.

The launcher asks for a launch on an executor and waits for its end. A keeper (`driver.keeper_task`) starts and watches
the broker there. It is a Spark job of one task, pinned to the executor, which is submitted again whenever it is lost
while the executor lives. `local[N]` has one executor, whose keeper keeps all brokers; elsewhere each keeper keeps one.

It is not one job with N tasks: a single lost executor would use up that job's retries and take every keeper down.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from dataclasses import dataclass, field

import msgspec
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests

from spark_broker.broker import hosting
from spark_broker.broker.hosting import KEEPER_VARIABLE
from spark_broker.broker.spec import LOST, BrokerOutcome, BrokerSpec, new_secret
from spark_broker.driver.executors import (
    LOCAL_EXECUTOR_ID,
    Executor,
    is_stopped,
    leaving_executors,
    live_executors,
    local_slots,
    pinned_rdd,
    removal_reason,
    says_that_it_is_stopped,
    with_environment,
)
from spark_broker.driver.hosts import HostListener
from spark_broker.driver.keeper_connections import KeeperConnection, KeeperConnections
from spark_broker.driver.keeper_task import (
    MISPLACED,
    RUN_BROKER,
    BrokerEnded,
    EndBroker,
    FromKeeper,
    Keep,
    KeeperOrder,
    Kept,
    Leave,
    keeper_task,
)
from spark_broker.driver.master import is_local, is_loopback
from spark_broker.errors import SparkBrokerError
from spark_broker.threads import BeginAgain, Worker, begin, start

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
"""How often the host looks for executors that came, went, or are about to go. The controller notices a broken session
sooner."""

SILENT_S = 5.0
"""A session that has answered nothing for so long is gone. One call may fail at a limit of the JVM or of this
process."""

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
LASTED_S = 10.0
"""A keeper that lasted this long was lost to an accident: the next one follows without a pause."""

IDLE_S = 10.0
"""How long a keeper waits for the next launch on its executor before it gives the slot back."""

CLOSE_TIMEOUT_S = 5.0
SUMMARY_CHARACTERS = 160

JOB_FAILURES = (Py4JError, OSError, AssertionError, AttributeError)
"""What a job raises when it fails. The last two come from a stopped context, whose JVM is None."""


@dataclass
class _Launch:
    """A launch that is to be kept. `ordered`: some keeper, perhaps a lost one, was ordered to start it."""

    spec: BrokerSpec
    ordered: bool = False
    outcome: BrokerOutcome | None = None


@dataclass
class _Post:
    """An executor with launches, and the keeper there. Guarded by the host's lock.

    `connection`: the keeper's, of the job with `token`. `lost_at_s`, `why_lost`: of the last keeper that was lost.
    `idle_since_s`: when the last launch ended. `over`: its executor is gone.
    """

    executor: Executor
    launches: dict[int, _Launch] = field(default_factory=dict)
    token: str = field(default_factory=new_secret)  # nobody knows it before a job has it
    connection: KeeperConnection | None = None
    lost_at_s: float | None = None
    why_lost: str = ""
    idle_since_s: float = 0.0
    over: bool = False

    @property
    def running(self) -> dict[int, _Launch]:
        """The launches that have not ended, by number."""
        return {number: launch for number, launch in self.launches.items() if launch.outcome is None}

    @property
    def is_idle(self) -> bool:
        return not self.launches and time.monotonic() - self.idle_since_s >= IDLE_S

    def lose_keeper(self, why: str) -> None:
        """Note why the keeper is lost, and end its connection if there still is one."""
        self.why_lost = why
        if self.connection is not None:
            self.connection.end()
            self.connection = None
            self.lost_at_s = time.monotonic()


class KeeperHost:
    """Runs brokers on a session's executors. Safe for use by many threads.

    `address`: where keepers find this driver; `driver_ports`: the setting of that name. `resource`: ask for one
    `broker` resource per keeper. `trouble`: how the last keeper was lost while it was needed.
    """

    def __init__(
        self, sc: SparkContext, address: str, *, resource: bool = False, entry: str = RUN_BROKER, driver_ports: str = ""
    ) -> None:
        self.shared_executor = is_local(sc.master)
        self._sc = sc
        self._address = address
        self._entry = entry
        self._profile = _broker_profile() if resource else None
        self._name = secrets.token_hex(8)
        # Spark keys its Python daemons by their environment: the keepers' serves no users' tasks and no other cluster.
        self._keepers_sc = with_environment(sc, KEEPER_VARIABLE, self._name)
        self._changed = threading.Condition()
        self._executors: list[Executor] = []
        self._posts: dict[str, _Post] = {}  # by executor id
        self._leaving: set[int] = set()  # launches whose executor Spark takes away, once the listener has noted it
        self._listener: HostListener | None = None
        self.trouble = ""
        self._closing = False
        self._closed = threading.Event()
        self._connections = KeeperConnections(address, self, driver_ports)
        self._watch = Worker("executors", BeginAgain(self._closed.is_set), self._watch_executors)

    def open(self, listener: HostListener) -> None:
        """Begin to watch executors and to accept keepers. Raises NoThreadError: then close it."""
        self._listener = listener
        self._executors = self._live_executors()
        start(self._connections)
        start(self._watch)

    def executors(self) -> list[Executor]:
        """The executors that are alive, and are to stay."""
        with self._changed:
            return list(self._executors)

    def run(self, executor: Executor, spec: BrokerSpec) -> BrokerOutcome:
        """Run one launch there; returns when it has ended, however it ended. Raises NoThreadError: nothing runs."""
        launch = _Launch(spec)
        with self._changed:
            post = self._posts.get(executor.id) or self._open_post(executor)
            if self._closing or post.over:
                return BrokerOutcome(reason=LOST, error_message="its executor is gone, or the cluster is being stopped")
            post.launches[spec.launch] = launch
            self._order(post, launch)
            # No deadline: a broker runs as long as the cluster does. Its end, or its executor's, wakes this thread.
            self._changed.wait_for(lambda: launch.outcome is not None)
            del post.launches[spec.launch]
            post.idle_since_s = time.monotonic()
        return launch.outcome or BrokerOutcome(reason=LOST)

    def close(self) -> None:
        """End every launch that still runs, by force; then end the keepers."""
        with self._changed:
            self._closing = True
            posts = list(self._posts.values())
            for post in posts:
                self._send(post, *(EndBroker(number) for number in post.running))
            if not is_stopped(self._sc):
                self._changed.wait_for(lambda: not any(post.running for post in posts), CLOSE_TIMEOUT_S)
            for post in posts:
                self._give_up(post)
                self._send(post, Leave(last=True))
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._posts, CLOSE_TIMEOUT_S)
            left = list(self._posts)
        if left and not is_stopped(self._sc):
            for executor_id in left:
                self._sc.cancelJobGroup(self._group(executor_id))
        self._closed.set()
        self._connections.close()
        if self._watch.is_alive() and threading.current_thread() is not self._watch:
            self._watch.join(CLOSE_TIMEOUT_S)

    def _give_up(self, post: _Post) -> None:
        """Give up the launches that no keeper has ended. If their executor is on this machine, end them from here."""
        for number, launch in post.running.items():
            if launch.ordered and not (is_loopback(self._sc.master) and _ended_here(launch.spec)):
                place = f"launch {number} on executor {post.executor.id}"
                logger.warning("%s has no keeper that could end it: it ends with its executor's JVM", place)
            launch.outcome = BrokerOutcome(reason=LOST, error_message="the cluster was stopped")

    def _open_post(self, executor: Executor) -> _Post:
        """Under the lock, which the new thread awaits. A post that nobody mans would keep its launches for ever."""
        post = _Post(executor)
        begin(f"keeper-{executor.id}", BeginAgain(lambda: self._is_closed(post)), lambda: self._man(post))
        self._posts[executor.id] = post
        return post

    def _man(self, post: _Post) -> None:
        """Run one keeper's job after the other, for as long as the executor lives and there is something to keep."""
        backoff_s = BACKOFF_FIRST_S
        while not self._is_closed(post):
            began_s = time.monotonic()
            why = self._run_job(post)
            with self._changed:
                self._note_loss(post, why)
                lasted = time.monotonic() - began_s >= LASTED_S
                backoff_s = BACKOFF_FIRST_S if lasted else min(2 * backoff_s, BACKOFF_MAX_S)
                self._changed.wait_for(lambda: post.over or self._closing, backoff_s)

    def _note_loss(self, post: _Post, why: str) -> None:
        """Log why a keeper was lost: as a warning if none ever came, because then nothing starts on this executor.

        Otherwise the next keeper's `Kept` is logged as a warning.
        """
        came = post.connection is not None or post.lost_at_s is not None
        if post.running and not self._closing:
            self.trouble = f"the keeper on executor {post.executor.id} was lost: {why}"
            logger.log(logging.INFO if came else logging.WARNING, "%s", self.trouble)
        post.lose_keeper(why)

    def _is_closed(self, post: _Post) -> bool:
        """Remove a post that is no longer needed; returns whether it is gone. A launch that must be ended needs it."""
        with self._changed:
            if post.running or not (post.over or self._closing or post.is_idle):
                return False
            del self._posts[post.executor.id]
            self._changed.notify_all()
            return True

    def _run_job(self, post: _Post) -> str:
        """Run a keeper until its task ends; returns why it did."""
        executor = post.executor
        with self._changed:
            post.token = new_secret()
        order = KeeperOrder(self._address, self._connections.port, post.token, executor.id, self._entry)
        what = "brokers" if self.shared_executor else "a broker"
        try:
            # Cancelled without an interrupt: one that comes while a Python worker starts would end the worker's daemon.
            self._sc.setJobGroup(self._group(executor.id), f"keeps {what} on executor {executor.id}", False)
            rdd = pinned_rdd(self._keepers_sc, executor, msgspec.json.encode(order)).mapPartitions(keeper_task())
            if self._profile is not None:
                rdd = rdd.withResources(self._profile)
            rows = rdd.collect()
        except JOB_FAILURES as error:
            return _summary(error)
        if bytes(rows[0]) == MISPLACED:
            return post.why_lost or "Spark ran its task on another executor"
        return "its task ended"

    def _group(self, executor_id: str) -> str:
        return f"spark-broker-{self._name}-{executor_id}"

    def welcome(self, connection: KeeperConnection, token: str) -> bool:
        with self._changed:
            post = next(
                (p for p in self._posts.values() if secrets.compare_digest(p.token.encode(), token.encode())), None
            )
            if post is None:
                return False
            if post.connection is not None:
                post.lose_keeper("Spark ran its task again")
            post.connection = connection
            for number, launch in post.running.items():
                self._order(post, launch)
                if self._closing:
                    self._send(post, EndBroker(number))
            return True

    def heard(self, connection: KeeperConnection, message: FromKeeper) -> None:
        with self._changed:
            post = self._post_of(connection)
            if post is None:
                return  # from a keeper that another one has replaced
            match message:
                case Kept():
                    _log_kept(post, message)
                case BrokerEnded(number, outcome):
                    launch = post.running.get(number)
                    if launch is not None:
                        launch.outcome = outcome
                        self._changed.notify_all()

    def gone(self, connection: KeeperConnection) -> None:
        with self._changed:
            post = self._post_of(connection)
            if post is not None:
                post.lose_keeper("its process is gone")

    def _post_of(self, connection: KeeperConnection) -> _Post | None:
        return next((post for post in self._posts.values() if post.connection is connection), None)

    def _order(self, post: _Post, launch: _Launch) -> None:
        """Order the keeper to start the launch, or only to adopt it if any keeper was ordered to start it before.

        A launch whose process is gone is not started again.
        """
        if post.connection is not None:
            start, launch.ordered = not launch.ordered, True
            self._send(post, Keep(launch.spec, start))

    def _send(self, post: _Post, *orders: Keep | EndBroker | Leave) -> None:
        if orders and post.connection is not None and not post.connection.send(*orders):
            post.lose_keeper("it took no orders")

    def _live_executors(self) -> list[Executor]:
        if self.shared_executor:
            return [Executor(LOCAL_EXECUTOR_ID, "127.0.0.1", local_slots(self._sc))]
        return live_executors(self._sc)

    def _watch_executors(self) -> None:
        answered_s = time.monotonic()
        while not self._closed.wait(WATCH_INTERVAL_S):
            try:
                if says_that_it_is_stopped(self._sc):
                    break
                executors = self._live_executors()
                self._update(executors, set() if self.shared_executor else leaving_executors(self._sc, executors))
            except JOB_FAILURES as error:
                if time.monotonic() - answered_s >= SILENT_S:
                    logger.warning("the Spark session does not answer any more: %s", _summary(error))
                    break
            else:
                answered_s = time.monotonic()
        if not self._closed.is_set() and self._listener is not None:
            self._listener.session_ended()

    def _update(self, executors: list[Executor], leaving: set[str]) -> None:
        """Notify the listener of executors that are new or gone, and of those that Spark is about to take away."""
        if self._listener is None:
            return
        alive = {executor.id for executor in executors}
        with self._changed:
            staying = [executor for executor in executors if executor.id not in leaving]
            changed, self._executors = staying != self._executors, staying
            posts = list(self._posts.values())
            lost = [post for post in posts if not post.over and post.executor.id not in alive]
            self._leaving.intersection_update(number for post in posts for number in post.running)
            going = [number for post in posts if post.executor.id in leaving for number in post.running]
            going = [number for number in going if number not in self._leaving]
            for post in posts:
                if post.is_idle or (not post.launches and post.executor.id in leaving):
                    self._send(post, Leave(last=False))
        for post in lost:
            self._lose(post)
        for number in going:
            self._tell_to_leave(number)
        if changed:
            self._listener.executors_changed()

    def _tell_to_leave(self, launch: int) -> None:
        """Notify the listener, once. What it cannot do now, it is to do after the next look."""
        if self._listener is None:
            return
        try:
            self._listener.executor_leaving(launch)
        except SparkBrokerError as error:
            logger.warning("launch %d cannot leave in order yet: %s", launch, error)
            return
        with self._changed:
            self._leaving.add(launch)

    def _lose(self, post: _Post) -> None:
        """The post's executor is gone, and every launch on it."""
        reason = removal_reason(self._sc, post.executor.id)
        with self._changed:
            lost = post.running
            post.over = True
            for launch in lost.values():
                message = f"its executor is gone: {reason}" if reason else "its executor is gone"
                launch.outcome = BrokerOutcome(reason=LOST, error_message=message)
            self._changed.notify_all()
        if self._listener is not None:
            for number in lost:
                self._listener.executor_lost(number)
        # Where no other executor has a free core, Spark would keep the job waiting to repeat its task.
        self._sc.cancelJobGroup(self._group(post.executor.id))


def _log_kept(post: _Post, kept: Kept) -> None:
    place = f"launch {kept.launch}, process {kept.pid}, on executor {post.executor.id}"
    if not kept.adopted:
        logger.info("%s: started", place)
        return
    alone_s = 0.0 if post.lost_at_s is None else time.monotonic() - post.lost_at_s
    logger.warning("%s: adopted %.1f s after its keeper was lost: %s", place, alone_s, post.why_lost)


def _ended_here(spec: BrokerSpec) -> bool:
    """End the launch's process on this machine; returns whether it is gone."""
    try:
        broker = hosting.adopt(spec)
        if broker is None:
            return True
        broker.kill()
        ended = broker.wait(CLOSE_TIMEOUT_S) is not None
        broker.close()
    except (OSError, SparkBrokerError) as error:
        logger.warning("launch %d was not ended: %s", spec.launch, error)
        return False
    return ended


def _broker_profile() -> ResourceProfile:
    return ResourceProfileBuilder().require(TaskResourceRequests().cpus(1).resource("broker", 1)).build


def _summary(error: BaseException) -> str:
    """One short line of Spark's error. The text of a Java exception is a page long."""
    if isinstance(error, Py4JJavaError):
        text = str(error.java_exception.getMessage() or error.java_exception)
    else:
        text = str(error).strip() or type(error).__name__
    line = text.splitlines()[0].rpartition("most recent failure: ")[2]
    return line if len(line) <= SUMMARY_CHARACTERS else f"{line[:SUMMARY_CHARACTERS]}..."
