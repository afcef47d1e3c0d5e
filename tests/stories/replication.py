"""The stage of replication: three or so replicas of one partition, which move when a command says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spark_broker.core.effects import (
    Acknowledge,
    AdvanceLogStart,
    Effect,
    HighWatermarkAdvanced,
    ProposeIsr,
    Refuse,
    RestartLog,
    SaveEpochs,
    SetAside,
    TruncateLog,
)
from spark_broker.core.replica import ACKS_ALL, Replica, Role
from tests.stories.script import Stage
from tests.unit.core.checker import Checker
from tests.unit.core.harness import Cluster, Node, Outcome, Request


class TracedCluster(Cluster):
    """Says what its replicas ask their shells to do."""

    def __init__(self, say: Callable[[str], None], brokers: int, min_insync_replicas: int) -> None:
        self._say = say
        self.names: dict[int, str] = {}  # of the values
        super().__init__(brokers, min_insync_replicas)

    def _carry_out_one(self, node: Node, effect: Effect) -> None:
        self._say(f"{node.id}: {self._told(effect)}")
        super()._carry_out_one(node, effect)

    def _told(self, effect: Effect) -> str:
        match effect:
            case SaveEpochs(history):
                pairs = " ".join(f"{epoch}@{offset}" for epoch, offset in history.to_pairs())
                return f"writes its leader epochs down: {pairs or 'none'}"
            case TruncateLog(offset, reason):
                return f"truncates its log to {offset}: {reason}"
            case RestartLog(reason):
                return f"rebuilds its log: {reason}"
            case SetAside(reason):
                return f"keeps its log aside, and begins anew: {reason}"
            case AdvanceLogStart(offset):
                return f"log start {offset}"
            case HighWatermarkAdvanced(offset):
                return f"high watermark {offset}"
            case Acknowledge(token, base_offset):
                return f"acknowledges {self._name(token)} at {base_offset}"
            case Refuse(token, error):
                return f"refuses {self._name(token)}: {type(error).__name__}: {error.message}"
            case ProposeIsr():
                isr = " ".join(str(broker) for broker, _ in effect.isr)
                return f"proposes the ISR {isr}: {effect.reason}"

    def _name(self, token: object) -> str:
        assert isinstance(token, Outcome)
        return self.names[token.value]


class ReplicationStage(Stage):
    """Brokers 1, 2, ... replicate one partition; broker 1 leads first, and all are in the ISR.

    A log is shown batch by batch as `name/leader epoch`; the bar is the high watermark. After every command the rules
    of `tests.unit.core.checker` are checked, until records are given up.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, str] = {}
        self._checker: Checker | None = Checker()
        self.cluster = TracedCluster(self.say, 3, 2)

    def after(self) -> None:
        """Say whose state has changed, and check the rules."""
        for who, state in self._states().items():
            if self._shown.get(who) != state:
                self.say(f"{who:<10} {state}")
                self._shown[who] = state
        if self._checker is not None:
            self._checker.check(self.cluster)

    def _states(self) -> dict[str, str]:
        states = {f"broker {broker}": self._state(node) for broker, node in self.cluster.nodes.items()}
        metadata, assignment = self.cluster.controller.metadata, self.cluster.controller.assignment
        leader = f"broker {assignment.leader} leads" if assignment.leader >= 0 else "nobody leads"
        elr = f", ELR {_brokers(metadata.elr)}" if metadata.elr else ""
        live = _brokers(tuple(sorted(metadata.live)))
        epoch = assignment.leader_epoch
        states["controller"] = f"{leader} in epoch {epoch}, ISR {_brokers(assignment.isr)}{elr}, live {live}"
        return states

    def _state(self, node: Node) -> str:
        batches = [(entry.base_offset, self._batch(entry.value, entry.info.leader_epoch)) for entry in node.log.entries]
        if node.replica is None:
            return f"is down, log {' '.join(text for _, text in batches)}".rstrip()
        high_watermark = node.replica.high_watermark
        below = [text for offset, text in batches if offset < high_watermark]
        above = [text for offset, text in batches if offset >= high_watermark]
        start = f" from {node.log.log_start_offset}" if node.log.log_start_offset else ""
        return f"{_role(node.replica)}, log{start} {' '.join([*below, '|', *above])}"

    def _batch(self, value: int, leader_epoch: int) -> str:
        return f"{self.cluster.names[value]}/{leader_epoch}"

    def do_cluster(self, *, brokers: str = "3", min_isr: str = "2") -> None:
        self.cluster = TracedCluster(self.say, int(brokers), int(min_isr))
        self._trace.clear()  # The state is enough to begin with.

    def do_append(self, broker: str, *names: str, acks: str = "all", epoch: str = "") -> None:
        for name in names:
            value = len(self.cluster.names)
            self.cluster.names[value] = name
            chosen = {"acks": ACKS_ALL if acks == "all" else int(acks), "epoch": int(epoch) if epoch else None}
            self.cluster.append(int(broker), value, **chosen)  # type: ignore[arg-type]

    def do_fetch(self, *followers: str, batches: str = "100") -> None:
        """Ask, and carry out the answer."""
        for follower in map(int, followers):
            request = self.cluster.ask(follower)
            if request is None:
                self.say(f"{follower} has nobody to ask")
                continue
            self._say_request(request)
            answer = self.cluster.serve_or_raise(request, int(batches))
            if answer is None:
                self.say(f"{request.leader} does not answer")
                continue
            diverging = answer.fetched.diverging
            if diverging is not None:
                self.say(f"{request.leader} answers: diverging, epoch {diverging.epoch} ends at {diverging.end_offset}")
            self.cluster.apply(answer)

    def do_fetch_unanswered(self, *followers: str) -> None:
        """Ask; the leader takes note, and its answer is lost."""
        for follower in map(int, followers):
            request = self.cluster.ask(follower)
            assert request is not None
            self._say_request(request)
            self.cluster.serve_or_raise(request)
            self.say(f"the answer of {request.leader} is lost")

    def _say_request(self, request: Request) -> None:
        position = request.position
        last = f", the last record of epoch {position.last_fetched_epoch}" if position.last_fetched_epoch >= 0 else ""
        self.say(f"{request.follower} asks {request.leader} from {position.fetch_offset} on{last}")

    def do_deliver(self, *brokers: str) -> None:
        """These brokers receive all metadata; without names, every broker does."""
        for broker in map(int, brokers or self.cluster.nodes):
            self.cluster.deliver(broker)

    def do_move_leader(self, broker: str) -> None:
        """The controller elects the broker; no broker has received that yet."""
        assert self.cluster.controller.move_leader(int(broker))

    def do_elect(self, broker: str) -> None:
        self.do_move_leader(broker)
        self.do_deliver()

    def do_elect_uncleanly(self, broker: str) -> None:
        """An operator accepts the loss of what this replica lacks: the rules are not checked any more."""
        self._checker = None
        kept = {entry.value for entry in self.cluster.nodes[int(broker)].log.entries}
        for value in [value for value in self.cluster.acknowledged if value not in kept]:
            self.say(f"given up: {self.cluster.names[value]}, which was acknowledged")
            del self.cluster.acknowledged[value]
        self.cluster.controller.elect_uncleanly(int(broker))
        self.do_deliver()

    def do_fence(self, *brokers: str) -> None:
        """The controller fences these brokers; no broker has received that yet."""
        self.cluster.controller.fence(*map(int, brokers))

    def do_unfence(self, *brokers: str) -> None:
        for broker in map(int, brokers):
            self.cluster.controller.unfence(broker)

    def do_decide(self, leader: str) -> None:
        """The controller answers the leader's proposal."""
        error = self.cluster.decide(int(leader))
        self.say(f"the controller answers: {type(error).__name__ if error else 'taken'}")

    def do_decide_unanswered(self, leader: str) -> None:
        """The controller decides on the proposal, and its answer is lost."""
        error = self.cluster.decide(int(leader), answer_lost=True)
        self.say(f"the controller's answer is lost: {type(error).__name__ if error else 'taken'}")

    def do_crash(self, broker: str, *, loses: str = "0") -> None:
        """kill -9, or, with batches to lose, a loss of power."""
        self.cluster.crash(int(broker), lost_batches=int(loses))

    def do_start(self, broker: str) -> None:
        self.cluster.start(int(broker))

    def do_pass(self, ms: str) -> None:
        """Time passes everywhere."""
        self.cluster.tick(int(ms))

    def do_no_room(self, follower: str) -> None:
        """The follower says that what comes next does not fit on its disk."""
        request = self.cluster.ask(int(follower))
        assert request is not None
        self._say_request(request)
        self.cluster.serve(replace(request, position=replace(request.position, no_room=True)))

    def do_log_start(self, leader: str, offset: str) -> None:
        """Retention at the leader."""
        self.cluster.advance_log_start(int(leader), int(offset))

    def do_latest(self, broker: str) -> None:
        """A client asks for the latest offset."""
        self.say(f"the latest offset is {self.cluster.replica(int(broker)).latest_offset(-1)}")

    def do_read(self, broker: str, *, offset: str, last_epoch: str) -> None:
        """A consumer goes on at this offset, after a record of this epoch."""
        replica = self.cluster.replica(int(broker))
        replica.check_lineage(-1, int(offset), int(last_epoch))
        self.say(f"may read from {offset} up to {replica.check_read(-1, int(offset))}")


def _brokers(brokers: tuple[int, ...]) -> str:
    return " ".join(map(str, brokers)) or "nobody"


def _role(replica: Replica) -> str:
    epoch, leader = replica.assignment.leader_epoch, replica.assignment.leader
    if replica.role is Role.LEADER:
        proposed = f", proposes {_brokers(replica.proposed_isr)}" if replica.proposed_isr else ""
        return f"leads in epoch {epoch}{proposed}"
    return f"follows {leader if leader >= 0 else 'nobody'} in epoch {epoch}"
