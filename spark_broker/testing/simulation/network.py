"""The network between simulated processes: streams that keep their order, as TCP does, and calls.

A link (a direction between two hosts) may be blocked: what is sent waits in the senders' buffers, as it does while TCP
retransmits, and comes late when the link is back, if both ends still have the stream open. A stream that breaks loses
its tail: of what was under way, an arbitrary prefix arrives. A call that is lost shows only as its time-out.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial

from spark_broker.errors import InvariantError, NetworkError, RequestTimedOutError, SparkBrokerError
from spark_broker.testing.simulation.scheduler import Process, Scheduler, Timer

Address = tuple[str, int]
Host = str
Reply = Callable[[object], None]

SPIKE_FACTOR = 40

LATE_SHARE = 0.5
LATE_MS = 3000.0
"""How many of the lost requests come after all, and how long that takes at most."""


class NetworkNode(Process):
    """A process with an address. `ends`: its open streams, in the order in which they were opened."""

    def __init__(self, name: str, host: Host) -> None:
        super().__init__(name)
        self.host = host
        self.ends: dict[End, None] = {}
        self.calls: dict[Call, None] = {}  # calls to this process that it has not answered

    def accept(self, kind: str, end: End) -> None:
        """A new stream: set its `on_message` and `on_break`."""
        raise InvariantError(f"{self} serves no streams of {kind}")

    def answer(self, request: object, reply: Reply) -> None:
        """A call: `reply` with a message, or with the error that the caller gets."""
        raise InvariantError(f"{self} answers no calls")


class End:
    """One end of a stream. `on_break` is called once, unless this end closed the stream itself."""

    __slots__ = (
        "_closed",
        "_due_us",
        "_network",
        "_outgoing",
        "kind",
        "on_break",
        "on_message",
        "owner",
        "peer",
        "to",
        "vanished",
    )

    def __init__(self, network: Network, owner: NetworkNode | None, to: Host, kind: str) -> None:
        self._network = network
        self._outgoing: deque[object] = deque()  # sent, not arrived
        self._due_us = 0
        self._closed = False
        self.vanished = False
        self.kind = kind
        self.owner = owner  # None: not accepted yet
        self.to = to
        self.peer: End = self
        self.on_message: Callable[[object], None] = _ignore
        self.on_break: Callable[[SparkBrokerError], None] = _ignore
        if owner is not None:
            owner.ends[self] = None

    @property
    def closed(self) -> bool:
        return self._closed

    def send(self, message: object) -> None:
        """Raises NetworkError when this end is closed. If the other end is gone, that shows only later."""
        if self._closed:
            raise NetworkError("the stream is broken")
        self._put(message)

    def close(self, last: object = None) -> None:
        """Send `last`, then the end of the stream."""
        if not self._closed:
            if last is not None:
                self._put(last)
            self._put(_END)
            self._forget()

    def cut(self) -> None:
        """This end's process is gone. Some of its last messages may be lost; then the peer sees the end."""
        if not self._closed:
            self._drop_tail()
            self._put(_END)
            self._forget()

    def vanish(self) -> None:
        """This end's machine is gone: the peer is not notified."""
        self._outgoing.clear()
        self.vanished = True
        self._forget()

    def broke(self, error: SparkBrokerError) -> None:
        """The stream broke under this end."""
        if not self._closed:
            self._drop_tail()
            self._put(_END)
            self._forget()
            self.on_break(error)

    def _drop_tail(self) -> None:
        for _ in range(self._network.rng.randint(0, len(self._outgoing))):
            self._outgoing.pop()

    def _forget(self) -> None:
        self._closed = True
        if self.owner is not None:
            self.owner.ends.pop(self, None)

    def _put(self, message: object) -> None:
        self._outgoing.append(message)
        network = self._network
        self._due_us = max(self._due_us, network.scheduler.now_us + network.delay_us(self.peer.to, self.to))
        network.deliver_at(self._due_us, self)

    def arrive(self) -> None:
        """The oldest message that is under way reaches the other end."""
        if not self._outgoing:
            return  # it was part of a lost tail
        message = self._outgoing.popleft()
        peer = self.peer
        if peer.vanished and not self._closed:
            self.broke(NetworkError("the peer knows nothing of this stream"))  # its machine is up again
        elif peer.closed:
            return
        elif message is _END:
            peer.end_of_stream()
        else:
            peer.on_message(message)

    def end_of_stream(self) -> None:
        """The other end is closed."""
        self._forget()
        self.on_break(NetworkError("the other side ended the stream"))


class Call:
    """A request to a listener, and its answer; answered, failed or timed out once."""

    __slots__ = ("_done", "_on_answer", "_on_error", "_timer", "caller", "ends_with_caller", "server")

    def __init__(
        self,
        network: Network,
        caller: NetworkNode,
        timeout_ms: float,
        on_answer: Callable[[object], None],
        on_error: Callable[[SparkBrokerError], None],
    ) -> None:
        self.caller = caller
        self.server: NetworkNode | None = None
        self.ends_with_caller = False
        self._on_answer = on_answer
        self._on_error = on_error
        self._done = False
        self._timer = Timer(network.scheduler, caller, "call timed out", self._timed_out)
        self._timer.set(timeout_ms)

    @property
    def is_void(self) -> bool:
        """Whether it is not served any more."""
        return self.ends_with_caller and not self.caller.alive

    def _timed_out(self) -> None:
        self.finish(RequestTimedOutError("the call was not answered in time"))

    def finish(self, result: object) -> None:
        """Give the caller the result, unless it has one already."""
        if self._done:
            return
        self._done = True
        self._timer.cancel()
        if self.server is not None:
            self.server.calls.pop(self, None)
        if isinstance(result, SparkBrokerError):
            self._on_error(result)
        else:
            self._on_answer(result)


class Network:
    """All links. `latency_ms`: a usual delay; `spike_rate`: how often one is many times longer."""

    def __init__(
        self,
        scheduler: Scheduler,
        rng: random.Random,
        late_rng: random.Random,
        *,
        latency_ms: float,
        spike_rate: float,
        loss_rate: float,
    ) -> None:
        self.scheduler = scheduler
        self.rng = rng
        self._late_rng = late_rng  # of its own: it leaves the other draws as they are
        self.listeners: dict[Address, NetworkNode] = {}
        self._addresses: dict[End, Address] = {}
        self._latency_us = latency_ms * 1000
        self._spike_rate = spike_rate
        self._loss_rate = loss_rate
        self._blocked: set[tuple[Host, Host]] = set()
        self._clogged_until_us: dict[tuple[Host, Host], int] = {}
        self._held: dict[End, int] = {}
        self._wire = Process("network")
        self.down: set[Host] = set()  # machines without power

    def block(self, source: Host, target: Host) -> None:
        """Nothing gets through in this direction from now on."""
        self._blocked.add((source, target))

    def part(self, one: Host, other: Host) -> None:
        """Nothing gets through in either direction from now on."""
        self.block(one, other)
        self.block(other, one)

    def clog(self, source: Host, target: Host, for_ms: float) -> None:
        """What is sent in this direction arrives after this time at the earliest."""
        self._clogged_until_us[source, target] = self.scheduler.now_us + int(for_ms * 1000)

    def heal(self) -> None:
        """Every link is back; what waited comes now."""
        self._blocked.clear()
        self._clogged_until_us.clear()
        held, self._held = self._held, {}
        for end, count in held.items():
            for _ in range(count):
                self.deliver_at(self.scheduler.now_us + self.delay_us(end.peer.to, end.to), end)

    def calm(self) -> None:
        """No losses and no spikes from now on."""
        self._loss_rate = self._spike_rate = 0.0

    def is_blocked(self, source: Host, target: Host) -> bool:
        return (source, target) in self._blocked

    def open(self, owner: NetworkNode, host: Host, address: Address, kind: str) -> End:
        """A stream to the process that listens at the address when the first message arrives."""
        here = End(self, owner, host, kind)
        there = End(self, None, owner.host, kind)
        here.peer, there.peer = there, here
        self._addresses[there] = address
        return here

    def deliver_at(self, time_us: int, end: End) -> None:
        """Schedule the next arrival of what this end has sent."""
        self.scheduler.push_quiet(time_us, self._wire, lambda: self._arrive(end))

    def _arrive(self, end: End) -> None:
        source, target = end.peer.to, end.to
        if (source, target) in self._blocked:
            self._held[end] = self._held.get(end, 0) + 1
            return
        if target in self.down:
            return
        process = end.peer.owner or self._connect(end)
        if process is None:
            return
        if process.paused:
            process.backlog.append((end.kind, end.arrive))
            return
        self.scheduler.count(process, end.kind)
        end.arrive()

    def _connect(self, opener: End) -> NetworkNode | None:
        """The first message has come: to a process that accepts the stream, or to a port that refuses it."""
        there = opener.peer
        listener = self.listeners.get(self._addresses.get(there, _NOWHERE))
        if listener is None or not listener.alive:
            if opener.owner is not None:
                error = NetworkError("connection refused")
                self.scheduler.after(0.2, opener.owner, "connection refused", lambda: opener.broke(error))
            return None
        del self._addresses[there]
        there.owner = listener
        listener.ends[there] = None
        listener.accept(there.kind, there)
        return listener

    def call(
        self,
        caller: NetworkNode,
        host: Host,
        address: Address,
        request: object,
        *,
        timeout_ms: float,
        on_answer: Callable[[object], None],
        on_error: Callable[[SparkBrokerError], None],
        ends_with_caller: bool = False,
    ) -> None:
        """Send a request; exactly one of `on_answer` and `on_error` is called.

        A request that is lost comes late at times, long after the caller has given it up, and behind newer ones: it was
        in a buffer of the network, or of a process that stood still.

        `ends_with_caller`: it does not come after the end of its caller.
        """
        call = Call(self, caller, timeout_ms, on_answer, on_error)
        time_us = self.scheduler.now_us
        if not self._lost(caller.host, host):
            time_us += self.delay_us(caller.host, host)
        elif self._late_rng.random() < LATE_SHARE:
            time_us += int(1000 * LATE_MS * self._late_rng.random())
        else:
            return
        call.ends_with_caller = ends_with_caller
        self.scheduler.push_quiet(time_us, self._wire, lambda: self._serve(call, host, address, request))

    def _serve(self, call: Call, host: Host, address: Address, request: object) -> None:
        if host in self.down or call.is_void:
            return
        server = self.listeners.get(address)
        if server is None or not server.alive:
            error = NetworkError("connection refused")
            self.scheduler.after(0.5, call.caller, "refused", lambda: call.finish(error))
            return

        def reply(result: object) -> None:
            if not self._lost(host, call.caller.host):
                delay_ms = self.delay_us(host, call.caller.host) / 1000
                self.scheduler.after(delay_ms, call.caller, "answer", lambda: call.finish(result))

        call.server = server
        server.calls[call] = None
        label = type(request).__name__
        if server.paused:
            server.backlog.append((label, lambda: None if call.is_void else server.answer(request, reply)))
            return
        self.scheduler.count(server, label)
        server.answer(request, reply)

    def _lost(self, source: Host, target: Host) -> bool:
        return (source, target) in self._blocked or self.rng.random() < self._loss_rate

    def process_died(self, process: NetworkNode, *, silently: bool) -> None:
        """The process's streams end. Its peers notice at once, unless its machine lost power (`silently`)."""
        for address, listener in list(self.listeners.items()):
            if listener is process:
                del self.listeners[address]
        for end in list(process.ends):
            end.vanish() if silently else end.cut()
        if not silently:
            for call in list(process.calls):
                broken = partial(call.finish, NetworkError("the server ended"))
                self.scheduler.after(1.0, call.caller, "call broke", broken)

    def delay_us(self, source: Host, target: Host) -> int:
        """How long the next message takes."""
        delay_us = self._latency_us * (0.3 + self.rng.random() * 1.4)
        if self._spike_rate and self.rng.random() < self._spike_rate:
            delay_us *= SPIKE_FACTOR * self.rng.random()
        if self._clogged_until_us:
            clogged_until_us = self._clogged_until_us.get((source, target), 0)
            delay_us += max(0, clogged_until_us - self.scheduler.now_us)
        return int(delay_us)


def _ignore(_: object) -> None:
    return


_END = object()
_NOWHERE: Address = ("", 0)
