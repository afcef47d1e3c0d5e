"""A real Kafka on this machine, from Maven's packages, to compare our figures with."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from spark_broker.errors import InvalidConfigError

HERE = Path(__file__).resolve().parent / "kafka"
START_TIMEOUT_S = 60
HEAP = "1g"


def jars(pom: str, target: Path) -> list[Path]:
    """Copy the packages that `kafka/<pom>` names, with dependencies, to a directory. Raises InvalidConfigError."""
    target.mkdir(parents=True, exist_ok=True)
    command = ["mvn", "-q", "-B", "-f", str(HERE / pom), "dependency:copy-dependencies", "-DincludeScope=runtime"]
    try:
        run = subprocess.run([*command, f"-DoutputDirectory={target}"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise InvalidConfigError("Maven is not installed: it brings Kafka and its connector") from None
    if run.returncode:
        raise InvalidConfigError(f"Maven could not bring {pom}: {run.stdout[-2000:]}")
    return sorted(target.glob("*.jar"))


@contextmanager
def kafka(base: Path, partitions: int, *, brokers: int = 1) -> Iterator[str]:
    """`host:port` of each broker of a Kafka that creates topics on first use. The first one is the controller, too.
    Raises InvalidConfigError when one does not start.
    """
    jars("server.xml", base / "server")
    controller_port, *ports = _free_ports(1 + brokers)
    cluster_id = uuid.uuid4().hex[:22]
    with ExitStack() as running:
        for node, port in enumerate(ports, 1):
            running.enter_context(
                _broker(base, cluster_id, _properties(base, node, port, controller_port, partitions, brokers))
            )
            # The controller first: the others register with it.
        yield ",".join(f"127.0.0.1:{port}" for port in ports)


@contextmanager
def _broker(base: Path, cluster_id: str, properties: dict[str, object]) -> Iterator[None]:
    """One process of the cluster, which takes connections."""
    node, is_controller = properties["node.id"], "controller" in str(properties["process.roles"])
    settings, log_file = base / f"server-{node}.properties", base / f"kafka-{node}.log"
    settings.write_text("".join(f"{name}={value}\n" for name, value in properties.items()), encoding="utf-8")
    java = [str(Path(os.environ["JAVA_HOME"]) / "bin" / "java"), f"-Xmx{HEAP}", f"-Xms{HEAP}"]
    java += ["-cp", f"{base / 'server'}/*"]
    role = "--standalone" if is_controller else "--no-initial-controllers"
    tool = ["kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(settings), role]
    subprocess.run([*java, *tool], check=True, capture_output=True)
    with log_file.open("wb") as log:
        server = subprocess.Popen([*java, "kafka.Kafka", str(settings)], stdout=log, stderr=subprocess.STDOUT)
    try:
        port = int(str(properties["listeners"]).split(",")[0].rpartition(":")[2])
        _await_port(port, server, log_file)
        yield
    finally:
        server.terminate()
        server.wait()


def steady_kafka(base: Path, servers: str, topic: str, rate: int, seconds: int) -> list[str]:
    """The command of Kafka's own producer, at this rate of records of 100 bytes. `base`: the one that `kafka` was
    given.
    """
    java = [str(Path(os.environ["JAVA_HOME"]) / "bin" / "java"), "-cp", f"{base / 'server'}/*"]
    size = ["--num-records", str(rate * seconds), "--record-size", "100", "--throughput", str(rate)]
    properties = ["--producer-props", f"bootstrap.servers={servers}", "acks=all"]
    return [*java, "org.apache.kafka.tools.ProducerPerformance", "--topic", topic, *size, *properties]


def _properties(
    base: Path, node: int, port: int, controller_port: int, partitions: int, brokers: int
) -> dict[str, object]:
    listeners = f"PLAINTEXT://127.0.0.1:{port}"
    if node == 1:
        listeners += f",CONTROLLER://127.0.0.1:{controller_port}"
    return {
        "process.roles": "broker,controller" if node == 1 else "broker",
        "node.id": node,
        "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller_port}",
        "listeners": listeners,
        "advertised.listeners": listeners,
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": base / f"data-{node}",
        "num.partitions": partitions,
        "log.message.timestamp.type": "LogAppendTime",
        "default.replication.factor": brokers,
        "offsets.topic.replication.factor": 1,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "group.initial.rebalance.delay.ms": 0,
    }


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def _await_port(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until and server.poll() is None:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        with suppress(subprocess.TimeoutExpired):
            server.wait(0.1)
    raise InvalidConfigError(f"Kafka did not start: {log.read_text()[-2000:]}")
