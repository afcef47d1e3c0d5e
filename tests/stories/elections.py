"""The stage of elections: the production controller, and brokers that say what a command tells them to."""

from __future__ import annotations

from spark_broker.controller.effects import CloseSession, Effect, ProbePort
from spark_broker.controller.events import PortProbed, SparkLost
from spark_broker.controller.image import BrokerState, PartitionRegistration
from spark_broker.errors import ERRORS
from spark_broker.model import NO_LEADER
from spark_broker.protocol.messages import (
    AlterIsr,
    AlterPartitionRequest,
    AlterTopicConfigRequest,
    ElectLeadersRequest,
    ElectLeadersResponse,
    IsrMember,
)
from tests.stories.script import Stage
from tests.unit.controller.cluster import Cluster, registration
from tests.unit.controller.stories import damage


class ElectionStage(Stage):
    """Brokers 0, 1, ... and the topic `t`, replicated by all of them. The trace shows what the metadata log says."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, str] = {}
        self.cluster = Cluster()

    def after(self) -> None:
        """Say whose state has changed."""
        image = self.cluster.image
        states = {f"broker {broker.id}": _broker(broker) for broker in image.brokers.values()}
        topic = image.topic("t")
        for number, state in enumerate(topic.partitions if topic is not None else ()):
            states[f"t-{number}"] = _partition(state)
        for who, text in states.items():
            if self._shown.get(who) != text:
                self.say(f"{who:<9} {text}")
                self._shown[who] = text

    def _say_effects(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ProbePort(broker_id):
                    self.say(f"the port of broker {broker_id} is to be probed")
                case CloseSession(_, error):
                    self.say(f"a session is closed: {type(error).__name__}: {error.message}")

    def do_cluster(self, *, brokers: str = "3", min_isr: str = "2", partitions: str = "1") -> None:
        self.cluster.start_brokers(int(brokers))
        self.cluster.create_topic(
            partitions=int(partitions), factor=int(brokers), config={"min.insync.replicas": min_isr}
        )

    def do_stream_ends(self, broker: str) -> None:
        """The broker's session breaks."""
        self._say_effects(self.cluster.end_session(int(broker)))

    def do_port_refuses(self, broker: str) -> None:
        session = self.cluster.session_of[int(broker)]
        outcome = self.cluster.handle(PortProbed(int(broker), session, refused=True))
        self._say_effects(list(outcome.effects))

    def do_lose(self, *brokers: str) -> None:
        """One process after the other ends: its stream ends, and its port refuses connections."""
        for broker in brokers:
            self.cluster.end_session(int(broker))
            self.do_port_refuses(broker)

    def do_spark_loses(self, broker: str) -> None:
        """Spark reports the loss of the broker's executor."""
        self.cluster.handle(SparkLost(self.cluster.image.brokers[int(broker)].launch))

    def do_register(self, broker: str, *, start: str = "process_crash") -> None:
        """A new process on the broker's directory. It is not ready yet."""
        directory = self.cluster.image.brokers[int(broker)].directory_id
        launch = self.cluster.new_launch()
        self.cluster.register(registration(launch, directory, broker_id=int(broker), start_kind=start))

    def do_ready(self, *brokers: str) -> None:
        """Each broker's heartbeat says that its logs are open."""
        for broker in map(int, brokers):
            self.cluster.beat(broker)

    def do_full(self, broker: str) -> None:
        """The broker's heartbeat says that its disk is full."""
        self.cluster.beat(int(broker), full=True)

    def do_has_room(self, broker: str) -> None:
        self.cluster.beat(int(broker), full=False)

    def do_damaged(self, broker: str, number: str = "0") -> None:
        """The broker's heartbeat says that it has quarantined its replica of the partition."""
        damage(self.cluster, int(broker), [(self.cluster.topic().topic_id, int(number))])

    def do_pass(self, ms: str, *, alive: str = "") -> None:
        """Time passes, while these brokers send heartbeats."""
        self.cluster.pass_time(int(ms), [int(broker) for broker in alive.split(",") if broker])

    def do_log_end(self, broker: str, *, epoch: str, offset: str) -> None:
        """How far the broker's replica of t-0 reaches, from now on."""
        self.cluster.logs[int(broker), self.cluster.topic().topic_id, 0] = (int(epoch), int(offset))

    def do_propose_isr(self, *isr: str, lacking: str = "") -> None:
        """The leader of t-0 asks for this ISR."""
        topic, state, brokers = self.cluster.topic(), self.cluster.partition(), self.cluster.image.brokers
        members = [IsrMember(int(broker), brokers[int(broker)].epoch) for broker in isr]
        lacks = [int(broker) for broker in lacking.split(",") if broker]
        change = AlterIsr(topic.topic_id, 0, state.leader_epoch, state.partition_epoch, members, lacks)
        self.cluster.call(AlterPartitionRequest(state.leader, brokers[state.leader].epoch, [change]))

    def do_elect_uncleanly(self) -> None:
        """An operator accepts the loss of what the live replicas lack."""
        answer = self.cluster.call(ElectLeadersRequest(unclean=True))
        assert isinstance(answer, ElectLeadersResponse)
        for result in answer.results:
            error = ERRORS[result.error_code].__name__ if result.error_code else "elected"
            self.say(f"{result.topic}-{result.partition}: {error}")

    def do_configure(self, **values: str) -> None:
        """Settings of the topic, with underscores for dots."""
        self.cluster.call(
            AlterTopicConfigRequest("t", {name.replace("_", "."): value for name, value in values.items()})
        )

    def do_restart_controller(self) -> None:
        """The driver restarts on the same metadata."""
        self.cluster = Cluster(self.cluster.image)
        self.say(f"controller epoch {self.cluster.image.controller_epoch}")


def _broker(broker: BrokerState) -> str:
    state = "live" if broker.live else "hands over" if broker.in_controlled_shutdown else "fenced"
    return f"{state}, launch {broker.launch}, {broker.start_kind} start"


def _partition(state: PartitionRegistration) -> str:
    leader = f"led by {state.leader}" if state.leader != NO_LEADER else "led by nobody"
    sets = {"ISR": state.isr, "ELR": state.elr, "last known ELR": state.last_known_elr, "damaged": state.damaged}
    told = [f"{name} {' '.join(map(str, brokers))}" for name, brokers in sets.items() if brokers]
    return ", ".join([f"{leader} in epoch {state.leader_epoch}", *(told or ["ISR nobody"])])
